/* The yardstick: the same decode as cpu/attend_decode, written in C with intrinsics.
 *
 * Four query heads per KV head, head_dim 128, 4-bit line records (codec.md 5b); QK^T with int16
 * or int8 activations, PV with int8, online softmax over groups of 128 tokens. Compiled by the
 * bench with the system compiler, twice when the CPU allows it: AVX2 (vpmaddubsw, vpmaddwd) and
 * AVX-512 VNNI (vpdpbusd). Never part of the package's own computations.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { G = 4, D = 128, T = 128, CODES = 8192, RECORD = CODES + 3 * 256 };
#define INLINE static inline __attribute__((always_inline))
#define EACH(g) _Pragma("GCC unroll 16") for (int g = 0; g < G; g++)

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
enum { W = 16 };
typedef __m512 vf;
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define HALF(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define SET _mm512_set1_ps
#define ADD _mm512_add_ps
#define SUB _mm512_sub_ps
#define MUL _mm512_mul_ps
#define MAX _mm512_max_ps
#define FMA _mm512_fmadd_ps
#define ABS _mm512_abs_ps
#define HMAX _mm512_reduce_max_ps
#define HSUM _mm512_reduce_add_ps
INLINE vf exp2v(vf x) {
  vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = SUB(x, n);
#define SCALED(p) _mm512_scalef_ps(p, n)
#else
enum { W = 8 };
typedef __m256 vf;
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define HALF(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define SET _mm256_set1_ps
#define ADD _mm256_add_ps
#define SUB _mm256_sub_ps
#define MUL _mm256_mul_ps
#define MAX _mm256_max_ps
#define FMA _mm256_fmadd_ps
#define ABS(x) _mm256_andnot_ps(SET(-0.f), x)
INLINE float HMAX(vf v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
INLINE float HSUM(vf v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
INLINE vf exp2v(vf x) {
  x = MAX(x, SET(-126.f));
  vf n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = SUB(x, n);
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
#define SCALED(p) MUL(p, _mm256_castsi256_ps(e))
#endif
  vf p = FMA(SET(1.8775767e-3f), f, SET(8.9893397e-3f));
  p = FMA(p, f, SET(5.5826318e-2f));
  p = FMA(p, f, SET(2.4015361e-1f));
  p = FMA(p, f, SET(6.9315308e-1f));
  p = FMA(p, f, SET(9.9999994e-1f));
  return SCALED(p);
}
enum { N = D / W, PER = 32 / W };  /* vectors of a row, and of 32 values */

/* A row of 128 in one scale per 32: int8, and what rounding took from the sum. */
INLINE vf to_int8(const vf *y, int8_t *out, float *scales) {
  vf lost = SET(0.f);
  _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++) {
    const vf *v = y + b * PER;
    vf top = MAX(ABS(v[0]), ABS(v[1]));
    if (PER == 4) top = MAX(top, MAX(ABS(v[PER - 2]), ABS(v[PER - 1])));
    float most = HMAX(top), scale = most * (1.f / 127), inverse = most > 1e-30f ? 127.f / most : 0.f;
    scales[b] = scale;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    __m512i a = _mm512_cvtps_epi32(MUL(v[0], SET(inverse)));
    __m512i c = _mm512_cvtps_epi32(MUL(v[1], SET(inverse)));
    _mm_storeu_si128((__m128i *)(out + 32 * b), _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128((__m128i *)(out + 32 * b + 16), _mm512_cvtepi32_epi8(c));
    vf whole = _mm512_cvtepi32_ps(_mm512_add_epi32(a, c)), sum = ADD(v[0], v[1]);
#else
    __m256i i[4];
    for (int k = 0; k < 4; k++) i[k] = _mm256_cvtps_epi32(MUL(v[k], SET(inverse)));
    __m256i p = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
    p = _mm256_permutevar8x32_epi32(p, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)(out + 32 * b), p);
    __m256i t = _mm256_add_epi32(_mm256_add_epi32(i[0], i[1]), _mm256_add_epi32(i[2], i[3]));
    vf whole = _mm256_cvtepi32_ps(t), sum = ADD(ADD(v[0], v[1]), ADD(v[2], v[3]));
#endif
    lost = ADD(lost, SUB(sum, MUL(whole, SET(scale))));
  }
  return lost;
}

/* A row of 128 in int16 with one scale: high bytes then low bytes (VNNI), or 16-bit pairs in the
 * order in which masking a 32-bit word of codes delivers them: r0 r2 r1 r3 (AVX2). */
INLINE float to_int16(const vf *y, int16_t *out) {
  vf top = ABS(y[0]);
  _Pragma("GCC unroll 16") for (int i = 1; i < N; i++) top = MAX(top, ABS(y[i]));
  float most = HMAX(top), inverse = most > 1e-30f ? 32512.f / most : 0.f;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  int8_t *bytes = (int8_t *)out;
  _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) {
    __m512i v = _mm512_cvtps_epi32(MUL(y[i], SET(inverse)));
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i *)(bytes + W * i), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(bytes + D + W * i), _mm512_cvtepi32_epi8(v));
  }
#else
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int i = 0; i < N; i += 2) {
    __m256i a = _mm256_cvtps_epi32(MUL(y[i], SET(inverse)));
    __m256i b = _mm256_cvtps_epi32(MUL(y[i + 1], SET(inverse)));
    __m256i v = _mm256_shuffle_epi8(_mm256_packs_epi32(a, b), order);
    _mm256_storeu_si256((__m256i *)(out + W * i), _mm256_permute4x64_epi64(v, 0xD8));
  }
#endif
  return most * (1.f / 32512);
}

INLINE int word(const void *p) {
  int v;
  memcpy(&v, p, 4);
  return v;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
/* Two blocks of 16 outputs at a time, so that a broadcast serves two products. */
INLINE void dot(int wide, const uint8_t *c, long ahead, int16_t (*a16)[D], int8_t (*a8)[D],
                const float (*scales)[4], float (*out)[T]) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int o = 0; o < 8; o += 2, c += 2048) {
    __m512 f0[G], f1[G];
    __m512i x0[G], x1[G], y0[G], y1[G];
    EACH(g) {
      f0[g] = f1[g] = SET(0.f);
      x0[g] = x1[g] = y0[g] = y1[g] = _mm512_setzero_si512();
    }
    for (int b = 0; b < 4; b++) {
      if (!wide) EACH(g) x0[g] = x1[g] = _mm512_setzero_si512();
      _Pragma("GCC unroll 4") for (int s = 0; s < 4; s++) {
        const uint8_t *line = c + 256 * b + 64 * s;
        _mm_prefetch((const char *)(line + ahead), _MM_HINT_T0);
        _mm_prefetch((const char *)(line + 1024 + ahead), _MM_HINT_T0);
        __m512i v0 = _mm512_loadu_si512(line), v1 = _mm512_loadu_si512(line + 1024);
        __m512i c0[2] = {_mm512_and_si512(v0, low), _mm512_and_si512(_mm512_srli_epi16(v0, 4), low)};
        __m512i c1[2] = {_mm512_and_si512(v1, low), _mm512_and_si512(_mm512_srli_epi16(v1, 4), low)};
        _Pragma("GCC unroll 2") for (int p = 0; p < 2; p++) EACH(g) {
          int at = 32 * b + 16 * p + 4 * s;
          const int8_t *bytes = wide ? (const int8_t *)a16[g] : a8[g];
          __m512i act = _mm512_set1_epi32(word(bytes + at));
          x0[g] = _mm512_dpbusd_epi32(x0[g], c0[p], act);
          x1[g] = _mm512_dpbusd_epi32(x1[g], c1[p], act);
          if (wide) {
            act = _mm512_set1_epi32(word(bytes + D + at));
            y0[g] = _mm512_dpbusd_epi32(y0[g], c0[p], act);
            y1[g] = _mm512_dpbusd_epi32(y1[g], c1[p], act);
          }
        }
      }
      if (!wide) EACH(g) {
        f0[g] = FMA(_mm512_cvtepi32_ps(x0[g]), SET(scales[g][b]), f0[g]);
        f1[g] = FMA(_mm512_cvtepi32_ps(x1[g]), SET(scales[g][b]), f1[g]);
      }
    }
    EACH(g) {
      if (wide) {
        x0[g] = _mm512_add_epi32(_mm512_slli_epi32(x0[g], 8), y0[g]);
        x1[g] = _mm512_add_epi32(_mm512_slli_epi32(x1[g], 8), y1[g]);
        f0[g] = MUL(_mm512_cvtepi32_ps(x0[g]), SET(scales[g][0]));
        f1[g] = MUL(_mm512_cvtepi32_ps(x1[g]), SET(scales[g][0]));
      }
      STORE(&out[g][16 * o], f0[g]);
      STORE(&out[g][16 * o + 16], f1[g]);
    }
  }
}
#else
/* One line is two vectors of 8 outputs. */
INLINE void dot(int wide, const uint8_t *c, long ahead, int16_t (*a16)[D], int8_t (*a8)[D],
                const float (*scales)[4], float (*out)[T]) {
  const __m256i low = _mm256_set1_epi8(15), low16 = _mm256_set1_epi16(15);
  const __m256i one = _mm256_set1_epi16(1);
  for (int o = 0; o < 8; o++, c += 1024) {
    __m256 f0[G], f1[G];
    __m256i x0[G], x1[G];
    EACH(g) f0[g] = f1[g] = SET(0.f);
    EACH(g) x0[g] = x1[g] = _mm256_setzero_si256();
    for (int b = 0; b < 4; b++) {
      if (!wide) EACH(g) x0[g] = x1[g] = _mm256_setzero_si256();
      _Pragma("GCC unroll 4") for (int s = 0; s < 4; s++) {
        const uint8_t *line = c + 256 * b + 64 * s;
        _mm_prefetch((const char *)(line + ahead), _MM_HINT_T0);
        __m256i v0 = _mm256_loadu_si256((const __m256i *)line);
        __m256i v1 = _mm256_loadu_si256((const __m256i *)(line + 32));
        if (wide) {
          _Pragma("GCC unroll 4") for (int p = 0; p < 4; p++) { /* reds 0,2 / +16 / 1,3 / +16 */
            __m256i c0 = _mm256_and_si256(_mm256_srli_epi16(v0, 4 * p), low16);
            __m256i c1 = _mm256_and_si256(_mm256_srli_epi16(v1, 4 * p), low16);
            EACH(g) {
              int at = 32 * b + 16 * (p & 1) + 4 * s + 2 * (p >> 1);
              __m256i act = _mm256_set1_epi32(word(&a16[g][at]));
              x0[g] = _mm256_add_epi32(x0[g], _mm256_madd_epi16(c0, act));
              x1[g] = _mm256_add_epi32(x1[g], _mm256_madd_epi16(c1, act));
            }
          }
        } else {
          _Pragma("GCC unroll 2") for (int p = 0; p < 2; p++) {
            __m256i c0 = _mm256_and_si256(_mm256_srli_epi16(v0, 4 * p), low);
            __m256i c1 = _mm256_and_si256(_mm256_srli_epi16(v1, 4 * p), low);
            EACH(g) {
              __m256i act = _mm256_set1_epi32(word(&a8[g][32 * b + 16 * p + 4 * s]));
              x0[g] = _mm256_add_epi16(x0[g], _mm256_maddubs_epi16(c0, act));
              x1[g] = _mm256_add_epi16(x1[g], _mm256_maddubs_epi16(c1, act));
            }
          }
        }
      }
      if (!wide) EACH(g) {
        vf scale = SET(scales[g][b]);
        f0[g] = FMA(_mm256_cvtepi32_ps(_mm256_madd_epi16(x0[g], one)), scale, f0[g]);
        f1[g] = FMA(_mm256_cvtepi32_ps(_mm256_madd_epi16(x1[g], one)), scale, f1[g]);
      }
    }
    EACH(g) {
      if (wide) {
        f0[g] = MUL(_mm256_cvtepi32_ps(x0[g]), SET(scales[g][0]));
        f1[g] = MUL(_mm256_cvtepi32_ps(x1[g]), SET(scales[g][0]));
      }
      STORE(&out[g][16 * o], f0[g]);
      STORE(&out[g][16 * o + 8], f1[g]);
    }
  }
}
#endif

/* Some groups of one KV head: running maximum, sum and weighted values of G query heads. */
INLINE void walk(int wide, const float *q, const uint8_t *k, const uint8_t *v, int groups,
                 float *max_out, float *sum_out, float *values) {
  float tmp[G][T], scales[G][4], m[G], l[G], o[G][D], zero[G], alpha[G];
  int16_t a16[G][D];
  int8_t a8[G][D];
  EACH(g) m[g] = -INFINITY, l[g] = 0.f;
  memset(o, 0, sizeof o);
  for (int group = 0; group < groups; group++, k += RECORD, v += RECORD) {
    const uint16_t *ka = (const uint16_t *)(k + CODES), *va = (const uint16_t *)(v + CODES);
    long ahead = group + 1 < groups ? RECORD : 0;
    {
      vf s[N], z[N];
      _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) s[i] = HALF(ka + W * i);
      _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) z[i] = HALF(ka + D + W * i);
      EACH(g) {
        vf y[N], c = SET(0.f);
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) {
          vf x = LOAD(q + g * D + W * i);
          y[i] = MUL(x, s[i]);
          c = FMA(x, z[i], c);
        }
        if (wide) scales[g][0] = to_int16(y, a16[g]);
        else c = FMA(to_int8(y, a8[g], scales[g]), SET(7.5f), c);
        zero[g] = HSUM(c);
      }
    }
    dot(wide, k, ahead, a16, a8, (const float(*)[4])scales, tmp);
    {
      vf other[N];
      _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) other[i] = HALF(ka + 2 * D + W * i);
      EACH(g) {
        vf top = SET(-INFINITY);
        for (int i = 0; i < N; i++) {
          vf x = MUL(ADD(LOAD(&tmp[g][W * i]), SET(zero[g])), other[i]);
          STORE(&tmp[g][W * i], x);
          top = MAX(top, x);
        }
        float most = HMAX(top);
        alpha[g] = 1.f;
        if (most > m[g]) alpha[g] = exp2f(m[g] - most), m[g] = most;
      }
    }
    {
      vf s[N], z[N];
      _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) s[i] = HALF(va + W * i);
      _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) z[i] = HALF(va + T + W * i);
      EACH(g) {
        vf y[N], c = SET(0.f), sum = c;
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) {
          vf p = exp2v(SUB(LOAD(&tmp[g][W * i]), SET(m[g])));
          sum = ADD(sum, p);
          y[i] = MUL(p, s[i]);
          c = FMA(p, z[i], c);
        }
        l[g] = l[g] * alpha[g] + HSUM(sum);
        c = FMA(to_int8(y, a8[g], scales[g]), SET(7.5f), c);
        zero[g] = HSUM(c);
      }
    }
    dot(0, v, ahead, a16, a8, (const float(*)[4])scales, tmp);
    for (int i = 0; i < N; i++) {
      vf other = HALF(va + 2 * T + W * i);
      EACH(g) {
        vf x = MUL(ADD(LOAD(&tmp[g][W * i]), SET(zero[g])), other);
        STORE(&o[g][W * i], FMA(LOAD(&o[g][W * i]), SET(alpha[g]), x));
      }
    }
  }
  memcpy(max_out, m, sizeof m);
  memcpy(sum_out, l, sizeof l);
  memcpy(values, o, sizeof o);
}

/* Orthonormal Walsh-Hadamard transform, its own inverse. */
static void rotate(float *x, float factor) {
  const __m256 odd = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
  const __m256 pair = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
  const __m256 half = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), f = _mm256_set1_ps(factor);
  __m256 v[16];
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
    __m256 y = _mm256_loadu_ps(x + 8 * i);
    y = _mm256_fmadd_ps(y, odd, _mm256_permute_ps(y, 0xB1));
    y = _mm256_fmadd_ps(y, pair, _mm256_permute_ps(y, 0x4E));
    v[i] = _mm256_fmadd_ps(y, half, _mm256_permute2f128_ps(y, y, 1));
  }
  _Pragma("GCC unroll 4") for (int h = 1; h < 16; h *= 2)
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & h)) {
      __m256 a = v[i], b = v[i + h];
      v[i] = _mm256_add_ps(a, b);
      v[i + h] = _mm256_sub_ps(a, b);
    }
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)
    _mm256_storeu_ps(x + 8 * i, _mm256_mul_ps(v[i], f));
}

/* q, out: [heads * G, D] un-rotated; k, v: records [heads, groups]; parts: heads * chunks * G *
 * (D + 2) floats of workspace; wide: int16 QK^T, else int8. */
void yard_decode(int wide, int heads, int groups, int chunks, int threads, const float *q,
                 const uint8_t *k, const uint8_t *v, float *turned, float *parts, float *out) {
  const float root = 0.08838834764831845f; /* 1 / sqrt(128) */
  memcpy(turned, q, sizeof(float) * heads * G * D);
  for (int r = 0; r < heads * G; r++) rotate(turned + r * D, root * root * 1.4426950408889634f);
  int items = heads * chunks;
  float *m = parts, *l = m + items * G, *o = l + items * G;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
#endif
  for (int it = 0; it < items; it++) {
    int h = it / chunks, c = it % chunks;
    int a = (int)((long)groups * c / chunks), b = (int)((long)groups * (c + 1) / chunks);
    const uint8_t *kk = k + ((size_t)h * groups + a) * RECORD;
    const uint8_t *vv = v + ((size_t)h * groups + a) * RECORD;
    const float *row = turned + h * G * D;
    if (wide) walk(1, row, kk, vv, b - a, m + it * G, l + it * G, o + (size_t)it * G * D);
    else walk(0, row, kk, vv, b - a, m + it * G, l + it * G, o + (size_t)it * G * D);
  }
  for (int h = 0; h < heads; h++)
    for (int g = 0; g < G; g++) {
      float top = -INFINITY, sum = 0.f, *to = out + (h * G + g) * D;
      for (int c = 0; c < chunks; c++) top = fmaxf(top, m[(h * chunks + c) * G + g]);
      memset(to, 0, sizeof(float) * D);
      for (int c = 0; c < chunks; c++) {
        size_t at = (size_t)(h * chunks + c) * G + g;
        float f = exp2f(m[at] - top);
        sum += l[at] * f;
        for (int d = 0; d < D; d++) to[d] += f * o[at * D + d];
      }
      rotate(to, root / sum);
    }
}

/* The least any kernel must do: read n bytes (a multiple of 65536). */
uint64_t yard_read(const uint8_t *p, size_t n, int threads) {
  uint64_t total = 0;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : total) if (threads > 1)
#endif
  for (size_t block = 0; block < n / 65536; block++) {
    const __m256i *v = (const __m256i *)(p + block * 65536);
    __m256i a[8];
    for (int j = 0; j < 8; j++) a[j] = _mm256_setzero_si256();
    for (int i = 0; i < 2048; i += 8)
      _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)
        a[j] = _mm256_add_epi64(a[j], _mm256_loadu_si256(v + i + j));
    for (int j = 1; j < 8; j++) a[0] = _mm256_add_epi64(a[0], a[j]);
    total += (uint64_t)_mm256_extract_epi64(a[0], 0) + (uint64_t)_mm256_extract_epi64(a[0], 2);
  }
  return total;
}
