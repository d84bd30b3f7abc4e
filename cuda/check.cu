// What a device must show before its results are believed: the fragments of mma.cuh lie where that file says.
//
//   D[16, 8] = A[16, 16] · B[16, 8] + C[16, 8]
#include "mma.cuh"

// A uint16 (fp16 bits) [problems, 16, 16], B uint16 [problems, 16, 8], C, D float32 [problems, 16, 8]. A warp per problem. A and B
// come by way of copy16, in two groups.
extern "C" __global__ void __launch_bounds__(32) mma_check(const u16* A, const u16* B, const float* C, float* D) {
    __shared__ __align__(16) u16 left[16 * 16];
    __shared__ __align__(16) u16 right[16 * 8];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const i64 problem = blockIdx.x;
    copy16(left + 8 * lane, A + problem * 256 + 8 * lane);
    copy_commit();
    if (lane < 16) copy16(right + 8 * lane, B + problem * 128 + 8 * lane);
    copy_commit();
    copy_wait<1>();
    __syncwarp();
    u32 a[4], b[2];
    float d[4];
    for (int i = 0; i < 4; i++) {
        const u16* from = left + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
        a[i] = from[0] | (u32)from[1] << 16;
        d[i] = C[problem * 128 + (g + i / 2 * 8) * 8 + 2 * t + i % 2];
    }
    copy_wait<0>();
    __syncwarp();
    for (int i = 0; i < 2; i++) {
        const u16* from = right + (2 * t + 8 * i) * 8 + g;
        b[i] = from[0] | (u32)from[8] << 16;
    }
    mma_fp16(d, a, b);
    for (int i = 0; i < 4; i++) D[problem * 128 + (g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}
