// The dialect on CUDA (NVRTC or nvcc): no header is needed.
#define KERNEL(n) extern "C" __global__ __launch_bounds__(n) void
// With at least m blocks in flight per multiprocessor.
#define KERNEL_MIN(n, m) extern "C" __global__ __launch_bounds__(n, m) void
#define DEVICE static __device__ __forceinline__
#define GLOBAL
#define LOCAL
#define SHARED __shared__
// A shared array that LOAD4 reads: four values at a multiple of four.
#define ALIGNED __align__(16)
#define LOAD4(p) (*(LOCAL const f32x4 *)(p))
#define RESTRICT __restrict__
#define LID0 ((int)threadIdx.x)
#define GRP0 ((int)blockIdx.x)
#define GRP1 ((int)blockIdx.y)
#define GRP2 ((int)blockIdx.z)
#define BARRIER() __syncthreads()
#define WARP_SYNC() __syncwarp()
#define SHFL_XOR(v, m) __shfl_xor_sync(0xffffffffu, v, m, 32)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
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
#define DIV(a, b) __fdiv_rn(a, b)
#define QUICK_DIV(a, b) __fdividef(a, b)
#define SQRT64(x) sqrt(x)
#define LOG64(x) log(x)
#define EXP64(x) exp(x)
#define RINT64(x) rint(x)
#define FABS64(x) fabs(x)
#define ATOMIC_MIN(p, v) atomicMin(p, v)
DEVICE f32 half_to_f32(u16 h) { f32 f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE u16 f32_to_half(f32 f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
