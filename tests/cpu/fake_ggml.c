// A libggml that only pretends: rows of every type are float32, attention is a plain loop. Its
// struct layouts are its own on purpose, since the adapter must not know any.
// -DWITHOUT_QUANTIZE, -DRENAMED, -DNO_BACKEND, -DBAD_STATUS, -DABORTS, -DSHORT_ROWS break one thing each.
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct init { size_t size; void *buffer; bool no_alloc; };
struct tensor { int64_t ne[4]; float *data; struct tensor *src[3]; float scale; };
struct context { char *memory; size_t used, size; };
static int n_threads;

static void *take(struct context *c, size_t size) {
    char *at = c->memory + c->used;
    c->used += (size + 15) / 16 * 16;
    if (c->used > c->size) { fprintf(stderr, "the context is full\n"); abort(); }
    return at;
}
void *ggml_init(struct init p) {
    struct context *c = malloc(sizeof *c);
    *c = (struct context){malloc(p.size), 0, p.size};
    return c;
}
void ggml_free(struct context *c) { free(c->memory); free(c); }
size_t ggml_tensor_overhead(void) { return sizeof(struct tensor); }
size_t ggml_graph_overhead(void) { return 64; }
const char *ggml_version(void) { return "fake-1"; }
const char *ggml_type_name(int type) {
#ifdef RENAMED
    return type == 2 ? "q9_9" : type == 8 ? "q8_0" : "f16";
#else
    return type == 2 ? "q4_0" : type == 8 ? "q8_0" : "f16";
#endif
}
size_t ggml_row_size(int type, int64_t n) { return (void)type, n * sizeof(float); }
struct tensor *ggml_new_tensor_4d(struct context *c, int type, int64_t a, int64_t b, int64_t d,
                                  int64_t e) {
    struct tensor *t = take(c, sizeof *t);
    *t = (struct tensor){.ne = {a, b, d, e}};
    t->data = take(c, a * b * d * e * sizeof(float));
    return (void)type, t;
}
void *ggml_get_data(struct tensor *t) { return t->data; }
#ifndef WITHOUT_QUANTIZE
size_t ggml_quantize_chunk(int type, const float *from, float *to, int64_t start, int64_t rows,
                           int64_t n, const float *matrix) {
    if (start || matrix) abort();
    memcpy(to, from, rows * n * sizeof(float));
#ifdef SHORT_ROWS
    rows--;
#endif
    return (void)type, rows * n * sizeof(float);
}
#endif
struct tensor *ggml_flash_attn_ext(struct context *c, struct tensor *q, struct tensor *k,
                                   struct tensor *v, void *mask, float scale, float bias, float cap) {
    struct tensor *t = ggml_new_tensor_4d(c, 0, v->ne[0], q->ne[2], q->ne[1], 1);
    if (mask || bias || cap) abort();
#ifdef ABORTS
    fprintf(stderr, "fake.c:1: GGML_ASSERT(k->ne[1] == 0) failed\n");
    abort();
#endif
    t->src[0] = q, t->src[1] = k, t->src[2] = v, t->scale = scale;
    return t;
}
void *ggml_new_graph(struct context *c) { return take(c, sizeof(void *)); }
void ggml_build_forward_expand(struct tensor **graph, struct tensor *t) { *graph = t; }
void *ggml_backend_cpu_init(void) {
#ifdef NO_BACKEND
    return NULL;
#else
    return malloc(1);
#endif
}
void ggml_backend_free(void *b) { free(b); }
void ggml_backend_cpu_set_n_threads(void *b, int n) { (void)b, n_threads = n; }
int fake_threads(void) { return n_threads; }
int ggml_backend_graph_compute(void *b, struct tensor **graph) {
    struct tensor *t = *graph, *q = t->src[0], *k = t->src[1], *v = t->src[2];
    int64_t d = q->ne[0], n_q = q->ne[1], heads = q->ne[2], n = k->ne[1], gqa = heads / k->ne[2];
    float *p = malloc(n * sizeof(float));
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < n_q; i++) {
            const float *x = q->data + (h * n_q + i) * d, *keys = k->data + h / gqa * n * d;
            const float *values = v->data + h / gqa * n * d;
            float *out = t->data + (i * heads + h) * d, top = -INFINITY, sum = 0;
            for (int64_t j = 0; j < n; j++) {
                p[j] = 0;
                for (int64_t e = 0; e < d; e++) p[j] += x[e] * keys[j * d + e];
                top = fmaxf(top, p[j] *= t->scale);
            }
            memset(out, 0, d * sizeof(float));
            for (int64_t j = 0; j < n; j++) {
                sum += p[j] = expf(p[j] - top);
                for (int64_t e = 0; e < d; e++) out[e] += p[j] * values[j * d + e];
            }
            for (int64_t e = 0; e < d; e++) out[e] /= sum;
        }
    free(p);
    (void)b;
#ifdef BAD_STATUS
    return -1;
#else
    return 0;
#endif
}
#ifdef POOL
static int pauses;
void ggml_threadpool_params_init(int *p, int n) { p[600] = n; }
void *ggml_threadpool_new(int *p) { int *t = malloc(4); *t = p[600]; return t; }
void ggml_threadpool_free(void *t) { free(t); }
void ggml_threadpool_pause(int *t) { pauses += *t; }
void ggml_backend_cpu_set_threadpool(void *b, void *t) { (void)b, (void)t; }
int fake_pauses(void) { return pauses; }
#endif
#ifdef SCORE
int ggml_backend_score(void) { return SCORE; }
#endif
