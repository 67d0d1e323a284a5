// The dialect on the emulator (emulator/runtime.cpp): plain C++, one fiber per GPU thread.
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <utility>
extern "C" {
extern int kvk_lid, kvk_group[3];
void kvk_barrier(int line);
void kvk_warp_sync(int line);
void kvk_exchange(const void *in, void *out, int nbytes, int source, int line);
}
#define KERNEL(n) static void
#define KERNEL_MIN(n, m) KERNEL(n)
#define DEVICE static inline
#define GLOBAL
#define LOCAL
#ifdef KVK_PLAIN_SHARED
#define SHARED static  // AddressSanitizer puts red zones around plain statics only
#else
#define SHARED static __attribute__((section("kvk_shared")))
#endif
#define ALIGNED __attribute__((aligned(16)))
#define RESTRICT __restrict__
#define LID0 kvk_lid
#define GRP0 kvk_group[0]
#define GRP1 kvk_group[1]
#define GRP2 kvk_group[2]
#define BARRIER() kvk_barrier(__LINE__)
#define WARP_SYNC() kvk_warp_sync(__LINE__)
#define SHFL_XOR(v, m) kvk_shfl_xor(v, m, __LINE__)
#define UNROLL
#define NO_UNROLL
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t i32;
typedef int64_t i64;
typedef float f32;
typedef double f64;
struct f32x4 { f32 x, y, z, w; };
static inline f32x4 LOAD4(const f32 *p) { return f32x4{p[0], p[1], p[2], p[3]}; }
static inline f32 AS_FLOAT(u32 u) { f32 f; memcpy(&f, &u, 4); return f; }
static inline u32 AS_UINT(f32 f) { u32 u; memcpy(&u, &f, 4); return u; }
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#define FMA64(a, b, c) __builtin_fma(a, b, c)
#define FMAX(a, b) fmaxf(a, b)
#define FMIN(a, b) fminf(a, b)
#define FABS(a) fabsf(a)
#define EXP2(x) exp2f(x)
#define LOG(x) logf(x)
#define RINT(x) rintf(x)
#define FLOOR(x) floorf(x)
#define DIV(a, b) ((a) / (b))
#define QUICK_DIV(a, b) ((a) / (b))
#define SQRT64(x) sqrt(x)
#define LOG64(x) log(x)
#define EXP64(x) exp(x)
#define RINT64(x) rint(x)
#define FABS64(x) fabs(x)
static inline i32 ATOMIC_MIN(i32 *p, i32 v) { i32 old = *p; if (v < old) *p = v; return old; }
static inline f32 half_to_f32(u16 h) { _Float16 x; memcpy(&x, &h, 2); return (f32)x; }
static inline u16 f32_to_half(f32 f) { _Float16 x = (_Float16)f; u16 h; memcpy(&h, &x, 2); return h; }
template <class T> static inline T kvk_shfl_xor(T v, int mask, int line) {
    T r; kvk_exchange(&v, &r, sizeof(T), (kvk_lid & 31) ^ mask, line); return r;
}
template <class... A, size_t... I>
static inline void kvk_call(void (*f)(A...), void **p, std::index_sequence<I...>) {
    f(*(typename std::remove_reference<A>::type *)p[I]...);
}
template <class... A> static inline void kvk_apply(void (*f)(A...), void **p) {
    kvk_call(f, p, std::index_sequence_for<A...>{});
}
extern "C" char __start_kvk_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_kvk_shared[] __attribute__((weak, visibility("hidden")));
extern "C" void kvk_shared_range(char **a, char **b) { *a = __start_kvk_shared; *b = __stop_kvk_shared; }
#define ENTRY(name) extern "C" void kvk_entry_##name(void **p) { kvk_apply(name, p); }
