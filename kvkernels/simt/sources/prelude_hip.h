// The dialect on HIP: hiprtc has the runtime header built in, hipcc and clang include it.
#if !defined(__HIPCC_RTC__)
#include <hip/hip_runtime.h>
#endif
#define KERNEL(n) extern "C" __global__ __launch_bounds__(n) void
#define KERNEL_MIN(n, m) KERNEL(n)
#define DEVICE static __device__ __forceinline__
#define GLOBAL
#define LOCAL
#define SHARED __shared__
// A shared array that LOAD4 reads: four values at a multiple of four.
#define ALIGNED __attribute__((aligned(16)))
#define LOAD4(p) (*(LOCAL const f32x4 *)(p))
#define RESTRICT __restrict__
#define LID0 ((int)threadIdx.x)
#define GRP0 ((int)blockIdx.x)
#define GRP1 ((int)blockIdx.y)
#define GRP2 ((int)blockIdx.z)
#define BARRIER() __syncthreads()
#define WARP_SYNC() __builtin_amdgcn_wave_barrier()
// Not __shfl_xor_sync: older ROCm has none, newer wants a 64-bit mask.
#define SHFL_XOR(v, m) __shfl_xor(v, m, 32)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("nounroll")
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef float f32;
typedef float4 f32x4;
typedef double f64;
#define AS_FLOAT(u) __uint_as_float(u)
#define AS_UINT(f) __float_as_uint(f)
#define FMA(a, b, c) fmaf(a, b, c)
#define FMA64(a, b, c) fma(a, b, c)
#define FMAX(a, b) fmaxf(a, b)
#define FMIN(a, b) fminf(a, b)
#define FABS(a) fabsf(a)
#define EXP2(x) exp2f(x)
#define LOG(x) logf(x)
#define RINT(x) rintf(x)
#define FLOOR(x) floorf(x)
#define DIV(a, b) ((f32)((f64)(a) / (f64)(b)))
#define QUICK_DIV(a, b) ((a) * __builtin_amdgcn_rcpf(b))
#define SQRT64(x) sqrt(x)
#define LOG64(x) log(x)
#define EXP64(x) exp(x)
#define RINT64(x) rint(x)
#define FABS64(x) fabs(x)
#define ATOMIC_MIN(p, v) atomicMin(p, v)
DEVICE f32 half_to_f32(u16 h) { union { u16 u; _Float16 h; } c; c.u = h; return (f32)c.h; }
DEVICE u16 f32_to_half(f32 f) { union { u16 u; _Float16 h; } c; c.h = (_Float16)f; return c.u; }
