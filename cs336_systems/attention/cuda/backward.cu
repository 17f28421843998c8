// dQ, dK and dV in three launches: D, then everything by tiles of keys, then dQ in 16 bits.
//
// This is algorithm 2 as printed: a block owns keys and walks over the queries, and P is computed once. (The Triton
// kernels make two passes instead.) What a block knows of dQ it adds to fp32 sums in memory, so that dQ's last bits depend
// on the order of arrival, unless the blocks take turns.
//
// More macros: DO_VECTORS, whether rows of dO are as VECTORS says, too (not the gradient of a sum, one number with strides
// of 0); IN_TURNS, whether blocks add to dQ in a fixed order; STEP, the queries of a tile whose S and P are in registers
// at a time.
#include "tiles.cuh"

constexpr int M = BLOCK_N / (16 * WARPS);  // blocks of 16 keys of a warp
constexpr int QUERY_CHUNKS = BLOCK_M / 8;

// dQ of a tile is shared out over the warps as a grid: as many rows each as two blocks, if the columns allow it
constexpr int DQ_M = BLOCK_M % 32 == 0 && BLOCK_M * BLOCK_D / WARPS % 512 == 0 ? 2 : 1;
constexpr int DQ_COLUMNS = BLOCK_M * BLOCK_D / (WARPS * 16 * DQ_M), DQ_N = DQ_COLUMNS / 8;
static_assert(BLOCK_D % DQ_COLUMNS == 0 && DQ_N % 2 == 0 && WARPS % (BLOCK_D / DQ_COLUMNS) == 0, "dQ does not divide so");

struct Statistics {
    float l_log2, d;  // L · log2(e) and D of a query; on chip zeros for rows past the last one
};

// dQ / scale in fp32, as the threads hold it: tile after tile, [block of C][thread][number].
__device__ __forceinline__ float* sums_of_tile(float* sums, int index, int tile, int tiles) {
    return sums + ((long long)index * tiles + tile) * (BLOCK_M * BLOCK_D) + threadIdx.x * 4;
}
__device__ __forceinline__ int first_row_of_warp() { return threadIdx.x / 32 / (BLOCK_D / DQ_COLUMNS) * 16 * DQ_M; }
__device__ __forceinline__ int first_chunk_of_warp() { return threadIdx.x / 32 % (BLOCK_D / DQ_COLUMNS) * DQ_N; }

// ------------------------------------------------------------------------------------------------ before
// L and D of a tile of queries, and zeros for the sums of dQ. Grid: query tiles · batch · heads.
struct BeforeArguments {
    u16 *o, *grad_o;
    float* l;
    Statistics* statistics;
    float* sums;
    int* turns;
    Strides o_strides, do_strides;
    int heads, num_queries;
};

extern "C" __global__ void __launch_bounds__(THREADS) before_kernel(const BeforeArguments arg) {
    constexpr int LANES = 8;  // share a row
    const int tiles = (arg.num_queries + BLOCK_M - 1) / BLOCK_M, index = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const Matrix o(arg.o, arg.o_strides, index / arg.heads, index % arg.heads, arg.num_queries);
    const Matrix grad_o(arg.grad_o, arg.do_strides, index / arg.heads, index % arg.heads, arg.num_queries);
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int start = 0; start < BLOCK_M; start += THREADS / LANES) {
        const int in_tile = start + threadIdx.x / LANES, row = tile * BLOCK_M + in_tile;
        float sum = 0;
        if (in_tile < BLOCK_M && row < arg.num_queries) {
#pragma unroll
            for (int column = 8 * lane; column < HEAD_DIM; column += 8 * LANES) {
                const u16* x = o.data + row * o.row_stride + column * o.col_stride;
                const u16* y = grad_o.data + row * grad_o.row_stride + column * grad_o.col_stride;
                __align__(16) u16 xs[8];
                __align__(16) u16 ys[8];
                if (VECTORS) *(uint4*)xs = *(const uint4*)x;
                if (VECTORS && DO_VECTORS) *(uint4*)ys = *(const uint4*)y;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    if (column + j >= HEAD_DIM) break;
                    if (!VECTORS) xs[j] = x[j * o.col_stride];
                    if (!VECTORS || !DO_VECTORS) ys[j] = y[j * grad_o.col_stride];
                    sum += unpack(xs[j]) * unpack(ys[j]);
                }
            }
        }
        sum = sum_of_row(sum);
        sum += __shfl_xor_sync(0xffffffff, sum, 4);
        if (lane == 0 && in_tile < BLOCK_M && row < arg.num_queries) {
            const long long at = (long long)index * arg.num_queries + row;
            arg.statistics[at] = {arg.l[at] * LOG2_E, sum};
        }
    }
    float4* sums = (float4*)(arg.sums + (long long)blockIdx.x * (BLOCK_M * BLOCK_D));
#pragma unroll
    for (int i = 0; i < BLOCK_M * BLOCK_D / 4; i += THREADS)
        if (i + threadIdx.x < BLOCK_M * BLOCK_D / 4) sums[i + threadIdx.x] = make_float4(0, 0, 0, 0);
    if (IN_TURNS && threadIdx.x == 0) arg.turns[blockIdx.x] = 0;
}

// ------------------------------------------------------------------------------------------------ dK, dV, sums of dQ
// One tile of keys of one head; scores are transposed. Grid: key tiles · batch · heads.
//
// Each warp has 16·M keys, and the sums of dK and dV for them in registers. Sᵀ, Pᵀ and dSᵀ of a tile of queries stay in
// registers as well, where they are operands for dV and dK; dS goes to shared memory, for dQ wants it by queries. Two
// tiles of Q, dO and dS are on chip: while one is multiplied, the next Q and dO are on their way, and dQ of the last one
// is computed, so that a tile needs one barrier.
struct KeysArguments {
    u16 *q, *k, *v, *grad_o;
    Statistics* statistics;
    float* sums;
    int* turns;
    u16 *dk, *dv;
    Strides q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides;
    int batch_heads, heads, section, num_queries, num_keys;
    float scale, scale_log2;
};

constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, K_BYTES = BLOCK_N * ROW_BYTES, DS_BYTES = BLOCK_M * BLOCK_N * 2;

// dQ / scale of a tile of queries += dS K.
__device__ __forceinline__ void add_dq(u32 ds_tile, u32 k_tile, float* sums, int* turn, int tile) {
    const Blocks<QUERY_CHUNKS, false> ds_columns(ds_tile);
    const Rows k_rows(k_tile);
    float dq[DQ_M][DQ_N][4] = {};
#pragma unroll
    for (int key = 0; key < BLOCK_N; key += 16) {
        u32 a[DQ_M][4];
#pragma unroll
        for (int m = 0; m < DQ_M; ++m) ldmatrix<true>(a[m], ds_columns.at(key, first_row_of_warp() / 8 + 2 * m));
        multiply<true>(dq, a, k_rows, key, first_chunk_of_warp());
    }
    if (IN_TURNS) {  // waits for blocks of lower tiles, which have begun: `Place` gives them lower blockIdx
        if (threadIdx.x == 0)
            while (load_acquire(turn) != tile) {}
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < DQ_M; ++m)
#pragma unroll
        for (int n = 0; n < DQ_N; ++n) add_to_memory(sums + (m * DQ_N + n) * THREADS * 4, dq[m][n]);
    if (IN_TURNS) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) store_release(turn, tile + 1);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) keys_kernel(const KeysArguments arg) {
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 k_tile = shared_address(shared), v_tile = k_tile + K_BYTES;
    const u32 q_tiles = v_tile + K_BYTES, do_tiles = q_tiles + 2 * Q_BYTES, ds_tiles = do_tiles + 2 * Q_BYTES;
    const u32 statistics_of_tiles = ds_tiles + 2 * DS_BYTES;
    const int num_queries = arg.num_queries, num_keys = arg.num_keys;
    const Place place((num_keys + BLOCK_N - 1) / BLOCK_N, arg.section, arg.batch_heads, arg.heads);
    const Reader<VECTORS> q(Matrix(arg.q, arg.q_strides, place.batch, place.head, num_queries));
    const Reader<VECTORS> k(Matrix(arg.k, arg.k_strides, place.batch, place.head, num_keys));
    const Reader<VECTORS> v(Matrix(arg.v, arg.v_strides, place.batch, place.head, num_keys));
    const Reader<VECTORS && DO_VECTORS> grad_o(Matrix(arg.grad_o, arg.do_strides, place.batch, place.head, num_queries));
    const Statistics* statistics = arg.statistics + (long long)place.index * num_queries;
    const int warp_row = threadIdx.x / 32 * 16 * M, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first_key = place.tile * BLOCK_N, query_tiles = (num_queries + BLOCK_M - 1) / BLOCK_M;
    const int first_tile = IS_CAUSAL ? first_key / BLOCK_M : 0;  // earlier queries see none of these keys

    auto load_queries = [&](int tile, int stage) {
        q.load<BLOCK_M>(q_tiles + stage * Q_BYTES, tile * BLOCK_M);
        grad_o.load<BLOCK_M>(do_tiles + stage * Q_BYTES, tile * BLOCK_M);
        const int row = tile * BLOCK_M + threadIdx.x;
        if (threadIdx.x < BLOCK_M)
            copy<8>(statistics_of_tiles + (stage * BLOCK_M + threadIdx.x) * 8, statistics + row, row < num_queries);
    };
    auto add_dq_of = [&](int tile, int stage) {
        const int at = place.index * query_tiles + tile;
        add_dq(ds_tiles + stage * DS_BYTES, k_tile, sums_of_tile(arg.sums, place.index, tile, query_tiles),
               IN_TURNS ? arg.turns + at : nullptr, place.tile);
    };

    float dk[M][BLOCK_D / 8][4] = {}, dv[M][BLOCK_D / 8][4] = {};
    k.load<BLOCK_N>(k_tile, first_key);
    v.load<BLOCK_N>(v_tile, first_key);
    if (first_tile < query_tiles) load_queries(first_tile, 0);
    int stage = 0;
    for (int tile = first_tile; tile < query_tiles; ++tile, stage ^= 1) {
        wait_for_copies();
        __syncthreads();  // Q and dO are there, and dS of the last tile; nobody reads the last Q and dO any more
        if (tile + 1 < query_tiles) load_queries(tile + 1, stage ^ 1);
        if (tile > first_tile) add_dq_of(tile - 1, stage ^ 1);

        const bool masked = first_key + BLOCK_N > num_keys || (IS_CAUSAL && tile * BLOCK_M < first_key + BLOCK_N - 1);
        const u32 ds_tile = ds_tiles + stage * DS_BYTES;
        const Rows k_rows(k_tile + warp_row * ROW_BYTES), v_rows(v_tile + warp_row * ROW_BYTES);
#pragma unroll
        for (int step = 0; step < BLOCK_M; step += STEP) {
            // rows of these tiles past the last query are zeros, and so is what they add
            const u32 q_tile = q_tiles + stage * Q_BYTES + step * ROW_BYTES;
            const u32 do_tile = do_tiles + stage * Q_BYTES + step * ROW_BYTES;
            const u32 statistics_of_lane = statistics_of_tiles + (stage * BLOCK_M + step + 2 * t) * 8;
            float p[M][STEP / 8][4] = {}, ds[M][STEP / 8][4] = {};  // at first Sᵀ and dPᵀ
#pragma unroll
            for (int d = 0; d < CHUNKS; d += 2) {  // Sᵀ / scale = K Qᵀ
                u32 a[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) ldmatrix<false>(a[m], k_rows.at(16 * m, d));
                multiply<false>(p, a, Columns(q_tile), 0, d);
            }
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n) {
                const uint4 pair = load_shared(statistics_of_lane + n * 64);
                const float l[2] = {__uint_as_float(pair.x), __uint_as_float(pair.z)};
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) p[m][n][i] = exp2_of(p[m][n][i] * arg.scale_log2 - l[i % 2]);
            }
            if (masked) {
                const int key = first_key + warp_row + g, query = tile * BLOCK_M + step + 2 * t;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int row = key + 16 * m + i / 2 * 8;
                        // the first column that sees this key, less those of the lane: what it is compared with is constant
                        const int first = row >= num_keys ? BLOCK_M : IS_CAUSAL ? row - query : 0;
#pragma unroll
                        for (int n = 0; n < STEP / 8; ++n)
                            if (8 * n + i % 2 < first) p[m][n][i] = 0;
                    }
            }
#pragma unroll
            for (int d = 0; d < CHUNKS; d += 2) {  // dPᵀ = V dOᵀ
                u32 a[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) ldmatrix<false>(a[m], v_rows.at(16 * m, d));
                multiply<false>(ds, a, Columns(do_tile), 0, d);
            }
#pragma unroll
            for (int n = 0; n < STEP / 8; n += 2) {  // dV += Pᵀ dO
                u32 a[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) as_operand(a[m], p[m][n], p[m][n + 1]);
                multiply<true>(dv, a, Rows(do_tile), 8 * n, 0);
            }
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n) {  // dSᵀ = Pᵀ ∘ (dPᵀ − D)
                const uint4 pair = load_shared(statistics_of_lane + n * 64);
                const float d[2] = {__uint_as_float(pair.y), __uint_as_float(pair.w)};
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - d[i % 2]);
            }
#pragma unroll
            for (int n = 0; n < STEP / 8; n += 2) {  // dK / scale += dSᵀ Q
                u32 a[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    as_operand(a[m], ds[m][n], ds[m][n + 1]);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        store_shared(ds_tile + 4 * t + Swizzle<QUERY_CHUNKS>::offset(
                                         warp_row + 16 * m + i % 2 * 8 + g, step / 8 + n + i / 2), a[m][i]);
                }
                multiply<true>(dk, a, Rows(q_tile), 8 * n, 0);
            }
        }
    }
    wait_for_copies();  // of K and V, where no query sees these keys
    __syncthreads();
    if (first_tile < query_tiles) add_dq_of(query_tiles - 1, stage ^ 1);
    __syncthreads();  // nobody reads K any more
    float scale[M][2], one[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) scale[m][0] = scale[m][1] = arg.scale, one[m][0] = one[m][1] = 1;
    const Matrix dk_out(arg.dk, arg.dk_strides, place.batch, place.head, num_keys);
    const Matrix dv_out(arg.dv, arg.dv_strides, place.batch, place.head, num_keys);
    store_rows(dk_out, first_key + warp_row, dk, scale, k_tile, warp_row);
    store_rows(dv_out, first_key + warp_row, dv, one, v_tile, warp_row);
}

// ------------------------------------------------------------------------------------------------ after
// dQ in 16 bits from its sums. Grid: query tiles · batch · heads.
struct AfterArguments {
    float* sums;
    u16* dq;
    Strides dq_strides;
    int heads, num_queries;
    float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS) after_kernel(const AfterArguments arg) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int tiles = (arg.num_queries + BLOCK_M - 1) / BLOCK_M, index = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const float* sums = sums_of_tile(arg.sums, index, tile, tiles);
    __align__(16) float dq[DQ_M][DQ_N][4];
    float scale[DQ_M][2];
#pragma unroll
    for (int m = 0; m < DQ_M; ++m) {
        scale[m][0] = scale[m][1] = arg.scale;
#pragma unroll
        for (int n = 0; n < DQ_N; ++n) *(float4*)dq[m][n] = *(const float4*)(sums + (m * DQ_N + n) * THREADS * 4);
    }
    const Matrix out(arg.dq, arg.dq_strides, index / arg.heads, index % arg.heads, arg.num_queries);
    store_rows(out, tile * BLOCK_M + first_row_of_warp(), dq, scale, shared_address(shared), first_row_of_warp(), first_chunk_of_warp());
}
