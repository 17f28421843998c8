// The instructions that C++ has no word for. A warp's 32 threads execute those of the tensor cores together.
//
// Fragments, as the PTX ISA lays them out over a warp (g = lane / 4, t = lane % 4; each register holds a pair of 16-bit
// numbers, its first in the low half):
//
//     A (16 x 16)   a[0] row g,     columns 2t, 2t+1        a[2] row g,     columns 2t+8, 2t+9
//                   a[1] row g + 8, columns 2t, 2t+1        a[3] row g + 8, columns 2t+8, 2t+9
//     B (16 x 8)    b[0] rows 2t, 2t+1 of column g          b[1] rows 2t+8, 2t+9 of column g
//     C (16 x 8)    c[0], c[1] row g, columns 2t, 2t+1      c[2], c[3] row g + 8, columns 2t, 2t+1
//
// So two neighboring tiles of C, rounded to 16 bits, are a fragment of A: P goes from one matmul to the next without
// leaving its registers. A 16 x 8 half of A with an 8 x 8 half of B are the operands of Turing's smaller instruction.
//
// TURING selects the path of compute capability 7.5, which any later GPU runs too.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;

// ------------------------------------------------------------------------------------------------ tensor cores
// c += a b
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if TURING
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#elif BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four 8 x 8 matrices from shared memory: lane i points to row i % 8 of matrix i / 8 and gets, of each matrix, the pair
// of columns 2t, 2t+1 of row g; transposed, the pair of rows 2t, 2t+1 of column g.
template <bool TRANSPOSED>
__device__ __forceinline__ void ldmatrix(u32 (&x)[4], u32 row) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
}

// ------------------------------------------------------------------------------------------------ memory
__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void store_shared(u32 to, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
    return x;
}

// Copies BYTES (8 or 16) to shared memory, or zeros; with cp.async they are there after `wait_for_copies`.
template <int BYTES>
__device__ __forceinline__ void copy(u32 to, const void* from, bool exists) {
#if TURING
    if (BYTES == 16) {
        store_shared(to, exists ? *(const uint4*)from : make_uint4(0, 0, 0, 0));
    } else {
        const uint2 x = exists ? *(const uint2*)from : make_uint2(0, 0);
        store_shared(to, x.x), store_shared(to + 4, x.y);
    }
#else
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(exists ? 8 : 0) : "memory");
#endif
}

// Waits for this thread's copies; a barrier after it makes everyone's visible.
__device__ __forceinline__ void wait_for_copies() {
#if !TURING
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Adds four numbers to memory. At an address several blocks add in the order of arrival.
__device__ __forceinline__ void add_to_memory(float* to, const float (&x)[4]) {
#if CAPABILITY >= 90
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(x[i]) : "memory");
#endif
}

__device__ __forceinline__ int load_acquire(const int* from) {
    int x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ void store_release(int* to, int x) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// ------------------------------------------------------------------------------------------------ numbers
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two numbers in 16 bits each, rounded to the nearest.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 x;
#if TURING
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(x) : "f"(low), "f"(high));
#elif BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
    return x;
}

__device__ __forceinline__ float unpack(u16 x) {
#if BF16
    return __uint_as_float(u32(x) << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}
