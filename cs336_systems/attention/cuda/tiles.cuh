// FlashAttention-2 in CUDA C++ for compute capability 7.5 and later: what the kernels share.
//
// Symbols, with the equations of Dao, "FlashAttention-2" (2023), section 3:
//
//     Q (n_q, d), K and V (n_k, d)     inputs of one head; `scale` = 1/sqrt(d)
//     S = scale · Q Kᵀ                 scores; never stored (eq. 1)
//     L_i = log Σ_j exp(S_ij)          logsumexp of a row, natural logarithm; the one statistic that forward saves
//     P = exp(S − L)                   probabilities, recomputed in backward (algorithm 2, line 11)
//     O = P V                          output (eq. 3)
//     dP = dO Vᵀ,  D = rowsum(dO ∘ O)
//     dS = P ∘ (dP − D)                (eq. 4)
//     dQ = scale · dS K,  dK = scale · dSᵀ Q,  dV = Pᵀ dO
//
// exp is computed as exp2 with log2(e) folded into the scale: the hardware's instruction is exp2.
//
// A file is compiled for each case, with these macros: BLOCK_M query rows, BLOCK_N keys and BLOCK_D columns of a tile
// (d = HEAD_DIM rounded up to a multiple of 32, the rest being zeros); WARPS of a block; BLOCKS that are to fit a
// multiprocessor; IS_CAUSAL; BF16, else fp16; VECTORS, whether rows are contiguous, of a multiple of 8 numbers, and begin at
// multiples of 16 bytes; CAPABILITY and TURING (see instructions.cuh).
#pragma once
#include "instructions.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// ------------------------------------------------------------------------------------------------ tiles on chip
// A row of a tile in shared memory is made of chunks of 16 bytes, 8 numbers. ldmatrix reads a chunk of each of 8 rows at
// once, and the 32 banks hold 8 chunks: so that the eight lie in different banks, rows permute their chunks (XOR).
template <int CHUNKS>
struct Swizzle {
    static constexpr int PERIOD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
    __device__ static int of(int row) { return row % 8 / (8 / PERIOD); }
    __device__ static u32 offset(int row, int chunk) { return (row * CHUNKS + (chunk ^ of(row))) * 16; }
};

// Where a lane points ldmatrix for the 16 x 16 numbers of a tile that begin at a row, a multiple of 8, and an even chunk.
// The four 8 x 8 matrices come in the order of columns (DOWN: the second is below the first) or of rows:
//
//     operand of a matmul       tile holds it as   DOWN    transposed
//     A (16 rows, 16 deep)      [row][depth]       true    no
//     A                         [depth][row]       false   yes
//     B (16 deep, 2 · 8 wide)   [column][depth]    false   no
//     B                         [depth][column]    true    yes
template <int CHUNKS, bool DOWN>
struct Blocks {
    static constexpr int PERIOD = Swizzle<CHUNKS>::PERIOD;
    u32 start, swizzle;

    __device__ explicit Blocks(u32 tile) {
        const int lane = threadIdx.x % 32;
        const int row = DOWN ? lane % 16 : lane % 8 + lane / 16 * 8, right = DOWN ? lane / 16 : lane / 8 % 2;
        start = tile + row * CHUNKS * 16;
        swizzle = (right ^ Swizzle<CHUNKS>::of(row)) * 16;
    }
    __device__ u32 at(int row, int chunk) const {
        return start + (row * CHUNKS + chunk / PERIOD * PERIOD) * 16 + (chunk % PERIOD * 16 ^ swizzle);
    }
};

constexpr int CHUNKS = BLOCK_D / 8, ROW_BYTES = BLOCK_D * 2;
using Rows = Blocks<CHUNKS, true>;      // A of X, or, transposed, B of X
using Columns = Blocks<CHUNKS, false>;  // B of Xᵀ

// C (16·M x 8·N) += A (16·M x 16) B (16 x 8·N): A in registers, B at a row and a chunk of a tile.
template <bool TRANSPOSED, int M, int N, class Tile>
__device__ __forceinline__ void multiply(float (&c)[M][N][4], const u32 (&a)[M][4], const Tile& b, int row, int chunk) {
    static_assert(N % 2 == 0, "columns come in pairs of blocks");
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 x[4];
        ldmatrix<TRANSPOSED>(x, TRANSPOSED ? b.at(row, chunk + n) : b.at(row + 8 * n, chunk));
#pragma unroll
        for (int m = 0; m < M; ++m) mma(c[m][n], a[m], x[0], x[1]), mma(c[m][n + 1], a[m], x[2], x[3]);
    }
}

// Two neighboring blocks of C as a fragment of A.
__device__ __forceinline__ void as_operand(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack(left[0], left[1]), a[1] = pack(left[2], left[3]);
    a[2] = pack(right[0], right[1]), a[3] = pack(right[2], right[3]);
}

// ------------------------------------------------------------------------------------------------ matrices in memory
// (batch, heads, n, d) with strides in elements; offsets are 64-bit, since a tensor may have more than 2³¹ elements.
struct Strides {
    long long batch, head, row, col;
};

struct Matrix {  // of one head
    u16* data;
    long long row_stride, col_stride;
    int num_rows;

    __device__ Matrix(u16* tensor, const Strides& s, int batch, int head, int num_rows)
        : data(tensor + batch * s.batch + head * s.head), row_stride(s.row), col_stride(s.col), num_rows(num_rows) {}
};

// Which tile of which head a block computes. Heads are taken in sections whose tensors fit the L2 cache, and within a
// section all heads' first tiles come first: with a causal mask those with the most work, so that light ones fill the end.
// Blocks that take turns rely on this order, and on the hardware beginning blocks in the order of blockIdx.
struct Place {
    int tile, index, batch, head;

    __device__ Place(int tiles, int section, int batch_heads, int heads) {
        const int first = blockIdx.x / (section * tiles) * section, rest = blockIdx.x - first * tiles;
        const int here = min(section, batch_heads - first);
        tile = rest / here, index = first + rest % here, batch = index / heads, head = index % heads;
    }
};

// Reads tiles of rows of a matrix, all threads of a block together. A thread has one chunk of every PERIOD in a row, and
// rows PASS apart, where chunks are permuted alike: the next place differs by a constant, in memory and on chip.
template <bool IN_VECTORS>
struct Reader {
    static constexpr int PERIOD = Swizzle<CHUNKS>::PERIOD, PASS = THREADS / PERIOD;
    const u16* from;  // this thread's part of the first row
    long long row_stride, col_stride;
    int num_rows, row, chunk;

    __device__ explicit Reader(const Matrix& x)
        : row_stride(x.row_stride), col_stride(IN_VECTORS ? 1 : x.col_stride), num_rows(x.num_rows) {
        row = threadIdx.x / PERIOD, chunk = threadIdx.x % PERIOD;
        from = x.data + row * row_stride + chunk * 8 * col_stride;
    }

    // Rows first… as a tile of ROWS; zeros outside of the matrix.
    template <int ROWS>
    __device__ __forceinline__ void load(u32 tile, int first) const {
        const u16* at = from + first * row_stride;
        const u32 to = tile + Swizzle<CHUNKS>::offset(row, chunk);
        const int rows = num_rows - first - row;
#pragma unroll
        for (int down = 0; down < ROWS; down += PASS, at += PASS * row_stride) {
            if (ROWS % PASS && down + row >= ROWS) break;
#pragma unroll
            for (int right = 0; right < CHUNKS; right += PERIOD) {
                const int columns = HEAD_DIM - (chunk + right) * 8;  // and more, from here
                const bool exists = down < rows && (HEAD_DIM == BLOCK_D || columns > 0);
                load_chunk(to + (down * CHUNKS + right) * 16, at + right * 8 * col_stride, exists ? columns : 0);
            }
        }
    }

  private:
    __device__ __forceinline__ void load_chunk(u32 to, const u16* x, int columns) const {
        if constexpr (IN_VECTORS) {
            copy<16>(to, x, columns > 0);
        } else {  // one by one, at any stride; a stride of 0 is a broadcast
            u32 pairs[4];
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const u32 low = j < columns ? x[j * col_stride] : 0, high = j + 1 < columns ? x[(j + 1) * col_stride] : 0;
                pairs[j / 2] = low | high << 16;
            }
            store_shared(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        }
    }
};

// 16·M rows of a result, a warp's, from registers to the rows first… of a matrix, times a factor for each row (two for
// each 16). They pass through the warp's own rows of a tile, so that whole chunks are written.
template <int M, int N>
__device__ __forceinline__ void store_rows(
    const Matrix& x, int first, const float (&c)[M][N][4], const float (&factors)[M][2], u32 tile, int tile_row, int chunk = 0
) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float f = factors[m][half];
                store_shared(tile + Swizzle<CHUNKS>::offset(tile_row + 16 * m + 8 * half + g, chunk + n) + 4 * t,
                             pack(c[m][n][2 * half] * f, c[m][n][2 * half + 1] * f));
            }
    __syncwarp();
#pragma unroll
    for (int start = 0; start < 16 * M * N; start += 32) {
        const int i = start + lane, row = i / N, column = (chunk + i % N) * 8;
        if (first + row >= x.num_rows || column >= HEAD_DIM) continue;
        const uint4 values = load_shared(tile + Swizzle<CHUNKS>::offset(tile_row + row, chunk + i % N));
        u16* to = x.data + (first + row) * x.row_stride + column * x.col_stride;
        if (VECTORS) {
            *(uint4*)to = values;
        } else {
            const u32 pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (column + j < HEAD_DIM) to[j * x.col_stride] = u16(pairs[j / 2] >> 16 * (j % 2));
        }
    }
}

// Of the four lanes that share a row of C.
__device__ __forceinline__ float sum_of_row(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

__device__ __forceinline__ float max_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
