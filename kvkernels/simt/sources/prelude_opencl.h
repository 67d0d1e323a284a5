// The dialect in OpenCL C 1.2. fp16 goes through vload_half and vstore_half, which are core.
#pragma OPENCL FP_CONTRACT OFF
#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
#define KERNEL(n) __kernel __attribute__((reqd_work_group_size(n, 1, 1))) void
#define KERNEL_MIN(n, m) KERNEL(n)
#define DEVICE static inline __attribute__((always_inline))
#define GLOBAL __global
#define LOCAL __local
#define SHARED __local
// A shared array that LOAD4 reads: four values at a multiple of four.
#define ALIGNED __attribute__((aligned(16)))
#define LOAD4(p) (*(LOCAL const f32x4 *)(p))
#define RESTRICT restrict
#define LID0 ((int)get_local_id(0))
#define GRP0 ((int)get_group_id(0))
#define GRP1 ((int)get_group_id(1))
#define GRP2 ((int)get_group_id(2))
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
typedef uchar u8;
typedef ushort u16;
typedef uint u32;
typedef int i32;
typedef long i64;
typedef float f32;
typedef float4 f32x4;
#ifdef cl_khr_fp64
typedef double f64;
#define DIV(a, b) ((f32)((f64)(a) / (f64)(b)))
#else
#define DIV(a, b) ((a) / (b))
#endif
#define QUICK_DIV(a, b) ((a) / (b))
#define AS_FLOAT(u) as_float(u)
#define AS_UINT(f) as_uint(f)
#define FMA(a, b, c) fma(a, b, c)
#define FMA64(a, b, c) fma(a, b, c)
#define FMAX(a, b) fmax(a, b)
#define FMIN(a, b) fmin(a, b)
#define FABS(a) fabs(a)
#define EXP2(x) exp2(x)
#define LOG(x) log(x)
#define RINT(x) rint(x)
#define FLOOR(x) floor(x)
#define SQRT64(x) sqrt(x)
#define LOG64(x) log(x)
#define EXP64(x) exp(x)
#define RINT64(x) rint(x)
#define FABS64(x) fabs(x)
#define ATOMIC_MIN(p, v) atomic_min(p, v)
DEVICE f32 half_to_f32(u16 h) { return vload_half(0, (const half *)&h); }
DEVICE u16 f32_to_half(f32 f) { u16 h; vstore_half_rte(f, 0, (half *)&h); return h; }
