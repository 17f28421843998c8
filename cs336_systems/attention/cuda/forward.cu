// O and L of one tile of queries of one head (algorithm 1). Grid: query tiles · batch · heads.
//
// Each warp has 16·M query rows, and O's sums for them in registers. One tile of K and one of V are on chip: while K is
// multiplied, V is on its way, and the next K during the softmax and the multiplication of V. Two blocks on a
// multiprocessor fill each other's gaps.
#include "tiles.cuh"

constexpr int M = BLOCK_M / (16 * WARPS);  // blocks of 16 rows of a warp

struct Arguments {
    u16 *q, *k, *v, *o;
    float* l;
    Strides q_strides, k_strides, v_strides, o_strides;
    int batch_heads, heads, section, num_queries, num_keys;
    float scale_log2;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward_kernel(const Arguments arg) {
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 q_tile = shared_address(shared), k_tile = q_tile + BLOCK_M * ROW_BYTES, v_tile = k_tile + BLOCK_N * ROW_BYTES;
    const int tiles = (arg.num_queries + BLOCK_M - 1) / BLOCK_M, num_keys = arg.num_keys;
    const Place place(tiles, arg.section, arg.batch_heads, arg.heads);
    const int first_query = (tiles - 1 - place.tile) * BLOCK_M;  // with a causal mask the last queries see the most keys
    const Reader<VECTORS> q(Matrix(arg.q, arg.q_strides, place.batch, place.head, arg.num_queries));
    const Reader<VECTORS> k(Matrix(arg.k, arg.k_strides, place.batch, place.head, num_keys));
    const Reader<VECTORS> v(Matrix(arg.v, arg.v_strides, place.batch, place.head, num_keys));
    const int warp_row = threadIdx.x / 32 * 16 * M, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Rows q_rows(q_tile + warp_row * ROW_BYTES), v_rows(v_tile);
    const Columns k_columns(k_tile);

    // keys before `whole` need no mask; up to `end` they meet the diagonal or the ragged end; after that nothing is seen
    const int whole = IS_CAUSAL ? min(first_query + 1, num_keys) : num_keys;
    const int end = IS_CAUSAL ? min(first_query + BLOCK_M, num_keys) : num_keys;

    float o[M][BLOCK_D / 8][4] = {}, row_max[M][2], row_sum[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; ++m) row_max[m][0] = row_max[m][1] = -INFINITE;

    q.load<BLOCK_M>(q_tile, first_query);
    k.load<BLOCK_N>(k_tile, 0);
    for (int key = 0; key < end; key += BLOCK_N) {
        wait_for_copies();
        __syncthreads();  // K is there, and nobody reads the last V any more
        v.load<BLOCK_N>(v_tile, key);

        float s[M][BLOCK_N / 8][4] = {};  // Q Kᵀ
#pragma unroll
        for (int d = 0; d < CHUNKS; d += 2) {
            u32 a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) ldmatrix<false>(a[m], q_rows.at(16 * m, d));
            multiply<false>(s, a, k_columns, 0, d);
        }
        if (key + BLOCK_N > whole) {
            const int left = num_keys - key - 2 * t, seen = first_query + warp_row + g - key - 2 * t + 1;
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int limit = IS_CAUSAL ? min(left, seen + 16 * m + i / 2 * 8) : left;  // of this lane's columns
                        if (8 * n + i % 2 >= limit) s[m][n][i] = -INFINITE;
                    }
        }
        wait_for_copies();
        __syncthreads();  // V is there, and nobody reads this K any more
        if (key + BLOCK_N < end) k.load<BLOCK_N>(k_tile, key + BLOCK_N);

        // the online softmax: algorithm 1, lines 9 and 10. All rows' maxima come first, for shuffles take long
        float new_max[M][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float largest = row_max[m][half];
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
                    largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                new_max[m][half] = max_of_row(largest);
                grown |= new_max[m][half] > row_max[m][half];
            }
        if (__any_sync(0xffffffff, grown)) {  // rarely, after some tiles
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float alpha = exp2_of((row_max[m][half] - new_max[m][half]) * arg.scale_log2);
                    row_max[m][half] = new_max[m][half], row_sum[m][half] *= alpha;
#pragma unroll
                    for (int n = 0; n < BLOCK_D / 8; ++n) o[m][n][2 * half] *= alpha, o[m][n][2 * half + 1] *= alpha;
                }
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float shift = row_max[m][half] * arg.scale_log2;
                float sum = 0;  // of this lane's columns; lanes are added up at the end
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i)
                        sum += s[m][n][i] = exp2_of(  // from here on s is P
                            s[m][n][i] * arg.scale_log2 - shift);
                row_sum[m][half] += sum;
            }
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; n += 2) {  // O += P V
            u32 a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) as_operand(a[m], s[m][n], s[m][n + 1]);
            multiply<true>(o, a, v_rows, 8 * n, 0);
        }
    }

#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = sum_of_row(row_sum[m][half]);
            const int row = first_query + warp_row + 16 * m + 8 * half + g;
            if (t == 0 && row < arg.num_queries)
                arg.l[(long long)place.index * arg.num_queries + row] = (row_max[m][half] * arg.scale_log2 + log2_of(sum)) * LN_2;
            row_sum[m][half] = 1 / sum;
        }
    const Matrix out(arg.o, arg.o_strides, place.batch, place.head, arg.num_queries);
    store_rows(out, first_query + warp_row, o, row_sum, q_tile, warp_row);
}
