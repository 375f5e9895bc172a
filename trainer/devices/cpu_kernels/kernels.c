// What lies between BERT's matrix products on the CPU, in one pass over memory each; computed in fp32, gradients of
// weights summed in fp32 and in an order that no number of threads changes.
//
// Compiled by `build.py` at first use. This file includes itself for each type of numbers. rows: tokens; H: columns.

#ifndef T
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tgmath.h>

// Rows that share a stream of random bits, and rows that a thread handles at a time.
#define UNIT 16
// Numbers that one draw decides: 8 streams of 64 bits, 16 bits for each number.
#define DRAWN 32

typedef uint16_t bf16;
typedef uint64_t u64x8 __attribute__((vector_size(64)));

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline double load_f64(double x) { return x; }
static inline double store_f64(double x) { return x; }
static inline float load_f32(float x) { return x; }
static inline float store_f32(float x) { return x; }
static inline float load_bf16(bf16 x) { return float_of((uint32_t)x << 16); }
// Rounds to nearest, ties to even. NaN stays NaN: without the choice, a carry could make it zero.
static inline bf16 store_bf16(float x) {
    uint32_t u = bits_of(x);
    return (x != x ? 0x7fc00000u : u + 0x7fffu + ((u >> 16) & 1)) >> 16;
}

// e to the x: 2^n times a polynomial in the rest (coefficients of Cephes' expf), off by 2 units in the last place.
// The last product, instead of an addition to the exponent's bits, keeps NaN. Polynomials are summed in pairs (Estrin),
// which shortens the chain of products that wait for each other.
static inline float exponential_within_range(float x) {
    float shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the last bits are now the nearest integer
    float n = shifted - 12582912.f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float r2 = r * r;
    float p = (1.9875691500e-4f * r + 1.3981999507e-3f) * r2 + (8.3334519073e-3f * r + 4.1665795894e-2f);
    p = p * r2 + (1.6666665459e-1f * r + 5.0000001201e-1f);
    return (p * r2 + (r + 1.f)) * float_of((bits_of(shifted) - 0x4b400000u + 127u) << 23);
}
static inline float exponential_f32(float x) {
    x = x < -87.3f ? -87.3f : x;
    return exponential_within_range(x > 88.3f ? 88.3f : x);
}
static inline double exponential_f64(double x) { return exp(x); }

// The share of the normal distribution that lies below x; `bell` becomes e^(-x²/2). In fp32 the share beyond |x| is
// `bell` times a polynomial in |x| / 3 - 1, fitted up to |x| = 6, where `bell` is 1.5e-8: off by at most 9e-8, and in the
// tail, where nothing cancels, by 0.14 %. Beyond 13 both are those of 13, below 1e-30.
static inline float below_f32(float x, float *bell) {
    float distance = fabsf(x);
    distance = distance > 13.f ? 13.f : distance;
    *bell = exponential_within_range(-0.5f * distance * distance);
    float u = distance * (1.f / 3.f) - 1.f, u2 = u * u, u4 = u2 * u2;
    float low = (-0.0350778662f * u + 0.0421530046f) * u2 + (-0.062695168f * u + 0.0825329944f);
    float high = (0.0105218804f * u - 0.0140837822f) * u2 + (-0.03419571f * u + 0.00962925702f);
    low = low * u2 + (-0.103174813f * u + 0.121514685f);
    high = (high + 0.0122569185f * u4) * u2 + (0.00705743348f * u + 0.0284326524f);
    float p = high * (u4 * u2) + low;
    float tail = p * *bell;
    return x < 0.f ? tail : 1.f - tail;
}
static inline double below_f64(double x, double *bell) {
    *bell = exp(-0.5 * x * x);
    return 0.5 * erfc(-x * M_SQRT1_2);
}

// Eight generators SFC64 (Doty-Humphrey, PractRand), seeded by splitmix64 (Steele et al. 2014) from a call's seed and
// the number of the unit: which numbers are dropped depends on no thread.
typedef struct { u64x8 a, b, c, counter; } Random;

static inline uint64_t splitmix64(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline u64x8 draw(Random *random) {
    u64x8 drawn = random->a + random->b + random->counter;
    random->counter += 1;
    random->a = random->b ^ (random->b >> 11);
    random->b = random->c + (random->c << 3);
    random->c = ((random->c << 24) | (random->c >> 40)) + drawn;
    return drawn;
}

static inline Random seeded(uint64_t seed, int64_t unit, uint32_t drop) {
    Random random = {0};
    if (!drop) return random;
    for (int lane = 0; lane < 8; lane++) {
        uint64_t index = 3 * (8 * (uint64_t)unit + lane);
        random.a[lane] = splitmix64(seed, index);
        random.b[lane] = splitmix64(seed, index + 1);
        random.c[lane] = splitmix64(seed, index + 2);
        random.counter[lane] = 1;
    }
    for (int round = 0; round < 12; round++) draw(&random);
    return random;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#define CONCAT(a, b) a##_##b
#define EXPAND(a, b) CONCAT(a, b)
#define REAL double
#define REAL_KIND f64
#define T double
#define KIND f64
#include __FILE__
#undef REAL
#undef REAL_KIND
#undef T
#undef KIND
#define REAL float
#define REAL_KIND f32
#define T float
#define KIND f32
#include __FILE__
#undef T
#undef KIND
#define T bf16
#define KIND bf16
#include __FILE__

#else

#define NAME(name) EXPAND(name, KIND)
#define LOAD EXPAND(load, KIND)
#define STORE EXPAND(store, KIND)
#define EXP EXPAND(exponential, REAL_KIND)
#define BELOW EXPAND(below, REAL_KIND)

// Scale what is kept of n numbers, clear the rest: those whose 16 random bits are among the `drop` smallest numbers.
static inline void NAME(keep)(REAL *x, int64_t n, Random *random, uint32_t drop) {
    if (!drop) return;
    const REAL scale = (REAL)65536 / (65536 - drop);
    for (int64_t at = 0; at < n; at += DRAWN) {
        u64x8 drawn = draw(random);
        uint16_t decides[DRAWN];
        memcpy(decides, &drawn, sizeof decides);
        const int64_t count = n - at < DRAWN ? n - at : DRAWN;
        for (int64_t i = 0; i < count; i++) x[at + i] = decides[i] >= drop ? x[at + i] * scale : 0;
    }
}

// out = gelu(x + bias)
void NAME(gelu_forward)(const T *x, const REAL *bias, T *out, int64_t rows, int64_t H, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < H; i++) {
            REAL value = LOAD(x[row * H + i]) + bias[i], bell;
            out[row * H + i] = STORE(value * BELOW(value, &bell));
        }
}

// parts (blocks, H): each block's share of the bias's gradient.
void NAME(gelu_backward)(const T *gradient, const T *x, const REAL *bias, T *dx, REAL *parts, int64_t rows,
                         int64_t H, int64_t block, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < rows; start += block) {
        REAL *restrict d_bias = parts + start / block * H;
        memset(d_bias, 0, H * sizeof(REAL));
        for (int64_t row = start; row < least(rows, start + block); row++)
            for (int64_t i = 0; i < H; i++) {
                REAL value = LOAD(x[row * H + i]) + bias[i], bell, share = BELOW(value, &bell);
                REAL d = LOAD(gradient[row * H + i]) * (share + value * (REAL)0.3989422804014327 * bell);
                dx[row * H + i] = STORE(d);
                d_bias[i] += d;
            }
    }
}

// sum = dropout(product + bias) + residual of one row
static inline void NAME(sum_of)(const T *product, const REAL *bias, const T *residual, REAL *sum, int64_t H,
                             Random *random, uint32_t drop) {
    for (int64_t i = 0; i < H; i++) sum[i] = LOAD(product[i]) + bias[i];
    NAME(keep)(sum, H, random, drop);
    for (int64_t i = 0; i < H; i++) sum[i] += LOAD(residual[i]);
}

// out = weight · normalized(dropout(product + bias) + residual) + shift; scales (rows): 1 / standard deviation
void NAME(norm_forward)(const T *product, const REAL *bias, const T *residual, const REAL *weight,
                        const REAL *shift, T *out, REAL *means, REAL *scales, int64_t rows, int64_t H, double eps,
                        uint64_t seed, uint32_t drop, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < rows; start += UNIT) {
        Random random = seeded(seed, start / UNIT, drop);
        REAL x[H];
        for (int64_t row = start; row < least(rows, start + UNIT); row++) {
            NAME(sum_of)(product + row * H, bias, residual + row * H, x, H, &random, drop);
            REAL mean = 0, variance = 0;
#pragma omp simd reduction(+ : mean)
            for (int64_t i = 0; i < H; i++) mean += x[i];
            mean /= H;
#pragma omp simd reduction(+ : variance)
            for (int64_t i = 0; i < H; i++) variance += (x[i] - mean) * (x[i] - mean);
            const REAL scale = 1 / sqrt(variance / H + (REAL)eps);
            for (int64_t i = 0; i < H; i++)
                out[row * H + i] = STORE((x[i] - mean) * scale * weight[i] + shift[i]);
            means[row] = mean;
            scales[row] = scale;
        }
    }
}

// other: NULL, or to be added to gradient; parts (blocks, 3, H): each block's share of the gradients of bias, weight and
// shift; block: a multiple of UNIT
void NAME(norm_backward)(const T *gradient, const T *other, const T *product, const REAL *bias, const T *residual,
                         const REAL *weight, const REAL *means, const REAL *scales, T *d_product, T *d_residual,
                         REAL *parts, int64_t rows, int64_t H, int64_t block, uint64_t seed, uint32_t drop,
                         int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < rows; start += block) {
        REAL *sums = parts + start / block * 3 * H;
        memset(sums, 0, 3 * H * sizeof(REAL));
        Random forward = {0}, backward = {0};
        REAL x[H], d[H], given[H];
        for (int64_t row = start; row < least(rows, start + block); row++) {
            REAL *restrict d_bias = sums, *restrict d_weight = sums + H, *restrict d_shift = sums + 2 * H;
            if (row % UNIT == 0) forward = backward = seeded(seed, row / UNIT, drop);
            NAME(sum_of)(product + row * H, bias, residual + row * H, x, H, &forward, drop);
            const REAL mean = means[row], scale = scales[row];
            REAL sum = 0, along = 0;
            for (int64_t i = 0; i < H; i++) given[i] = LOAD(gradient[row * H + i]);
            if (other)
                for (int64_t i = 0; i < H; i++) given[i] += LOAD(other[row * H + i]);
#pragma omp simd reduction(+ : sum, along)
            for (int64_t i = 0; i < H; i++) {
                x[i] = (x[i] - mean) * scale;
                d[i] = given[i] * weight[i];
                sum += d[i];
                along += d[i] * x[i];
                d_weight[i] += given[i] * x[i];
                d_shift[i] += given[i];
            }
            sum /= H;
            along /= H;
            for (int64_t i = 0; i < H; i++) {
                d[i] = (d[i] - sum - x[i] * along) * scale;
                d_residual[row * H + i] = STORE(d[i]);
            }
            NAME(keep)(d, H, &backward, drop);
            for (int64_t i = 0; i < H; i++) {
                d_product[row * H + i] = STORE(d[i]);
                d_bias[i] += d[i];
            }
        }
    }
}

// out = dropout(x); the gradient of x from that of out is the same call.
void NAME(dropout)(const T *x, T *out, int64_t n, uint64_t seed, uint32_t drop, int threads) {
    const int64_t unit = 128 * DRAWN;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < n; start += unit) {
        Random random = seeded(seed, start / unit, drop);
        REAL some[unit];
        const int64_t count = least(unit, n - start);
        for (int64_t i = 0; i < count; i++) some[i] = LOAD(x[start + i]);
        NAME(keep)(some, count, &random, drop);
        for (int64_t i = 0; i < count; i++) out[start + i] = STORE(some[i]);
    }
}

// weights = softmax(factor · scores) over the first lengths[row / rows_of_length] columns of (rows, S) scores, 0 in the
// others; kept = dropout(weights). `weights` may be `scores`; without dropout, `kept` is not written.
void NAME(softmax_forward)(const T *scores, const int32_t *lengths, T *weights, T *kept, int64_t rows, int64_t S,
                           int64_t rows_of_length, double factor, uint64_t seed, uint32_t drop, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < rows; start += UNIT) {
        Random random = seeded(seed, start / UNIT, drop);
        REAL x[S];
        for (int64_t row = start; row < least(rows, start + UNIT); row++) {
            const int64_t length = lengths[row / rows_of_length];
            REAL most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
            for (int64_t i = 0; i < length; i++) {
                x[i] = LOAD(scores[row * S + i]) * (REAL)factor;
                most = x[i] > most ? x[i] : most;
            }
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < length; i++) {
                x[i] = EXP(x[i] - most);
                sum += x[i];
            }
            const REAL share = 1 / sum;
            for (int64_t i = 0; i < length; i++) {
                x[i] *= share;
                weights[row * S + i] = STORE(x[i]);
            }
            memset(weights + row * S + length, 0, (S - length) * sizeof(T));
            if (!drop) continue;
            NAME(keep)(x, length, &random, drop);
            for (int64_t i = 0; i < length; i++) kept[row * S + i] = STORE(x[i]);
            memset(kept + row * S + length, 0, (S - length) * sizeof(T));
        }
    }
}

// In place: the gradient of `kept` becomes that of `scores`.
void NAME(softmax_backward)(T *gradient, const T *weights, const int32_t *lengths, int64_t rows, int64_t S,
                            int64_t rows_of_length, double factor, uint64_t seed, uint32_t drop, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < rows; start += UNIT) {
        Random random = seeded(seed, start / UNIT, drop);
        REAL d[S];
        for (int64_t row = start; row < least(rows, start + UNIT); row++) {
            const int64_t length = lengths[row / rows_of_length];
            for (int64_t i = 0; i < length; i++) d[i] = LOAD(gradient[row * S + i]);
            NAME(keep)(d, length, &random, drop);
            REAL along = 0;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < length; i++) along += d[i] * LOAD(weights[row * S + i]);
            for (int64_t i = 0; i < length; i++)
                gradient[row * S + i] = STORE((d[i] - along) * LOAD(weights[row * S + i]) * (REAL)factor);
            memset(gradient + row * S + length, 0, (S - length) * sizeof(T));
        }
    }
}

// (rows · length, parts, A, D), whose rows begin `stride` numbers apart, → (parts, rows, A, S, D): what a matrix product
// takes. Places beyond `length` become 0.
void NAME(split_heads)(const T *joined, T *split, int64_t stride, int64_t parts, int64_t rows, int64_t length,
                       int64_t A, int64_t S, int64_t D, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t matrix = 0; matrix < rows * A; matrix++) {
            const T *from = joined + matrix / A * length * stride + (part * A + matrix % A) * D;
            T *to = split + (part * rows * A + matrix) * S * D;
            for (int64_t place = 0; place < length; place++) memcpy(to + place * D, from + place * stride, D * sizeof(T));
            memset(to + length * D, 0, (S - length) * D * sizeof(T));
        }
}

// The reverse. sums (rows · A, parts, D), unless it is NULL: the sum of each matrix over its places.
void NAME(join_heads)(const T *split, T *joined, REAL *sums, int64_t stride, int64_t parts, int64_t rows,
                      int64_t length, int64_t A, int64_t S, int64_t D, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t matrix = 0; matrix < rows * A; matrix++) {
            const T *from = split + (part * rows * A + matrix) * S * D;
            T *to = joined + matrix / A * length * stride + (part * A + matrix % A) * D;
            for (int64_t place = 0; place < length; place++) memcpy(to + place * stride, from + place * D, D * sizeof(T));
            if (!sums) continue;
            REAL *restrict sum = sums + (matrix * parts + part) * D;
            memset(sum, 0, D * sizeof(REAL));
            for (int64_t place = 0; place < length; place++)
                for (int64_t i = 0; i < D; i++) sum[i] += LOAD(from[place * D + i]);
        }
}

// sum += x
void NAME(add)(const T *x, REAL *sum, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) sum[i] += LOAD(x[i]);
}

// sums (words, H): each row of the gradient (rows, H) is added to that of its id, but for those of `padding`. Threads
// share the columns, so that each sum has its addends in their order.
void NAME(embedding_backward)(const T *gradient, const int64_t *ids, REAL *sums, int64_t rows, int64_t H,
                              int64_t padding, int threads) {
    const int64_t width = (H + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < H; start += width)
        for (int64_t row = 0; row < rows; row++) {
            if (ids[row] == padding) continue;
            REAL *restrict sum = sums + ids[row] * H;
            for (int64_t i = start; i < least(H, start + width); i++) sum[i] += LOAD(gradient[row * H + i]);
        }
}

// losses (rows): -log softmax(logits)[label], in nats, 0 where the label is `ignored`. stats (rows, 2): the largest
// logit, and 1 / the sum of the exponentials of what the others have less. Returns how many labels are no columns.
int64_t NAME(cross_entropy_forward)(const T *logits, const int64_t *labels, REAL *losses, REAL *stats, int64_t rows,
                                    int64_t V, int64_t ignored, int threads) {
    int64_t wrong = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : wrong)
    for (int64_t row = 0; row < rows; row++) {
        const T *of = logits + row * V;
        losses[row] = 0;
        if (labels[row] < 0 || labels[row] >= V) {
            wrong += labels[row] != ignored;
            continue;
        }
        REAL most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < V; i++) most = LOAD(of[i]) > most ? LOAD(of[i]) : most;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < V; i++) sum += EXP(LOAD(of[i]) - most);
        losses[row] = log(sum) + (most - LOAD(of[labels[row]]));
        stats[2 * row] = most;
        stats[2 * row + 1] = 1 / sum;
    }
    return wrong;
}

// gradient: that of the logits, from that of the sum of losses.
void NAME(cross_entropy_backward)(const T *logits, const int64_t *labels, const REAL *stats, T *gradient, int64_t rows,
                                  int64_t V, int64_t ignored, double of_sum, int threads) {
    const REAL factor = of_sum;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T *of = logits + row * V;
        if (labels[row] == ignored) {
            memset(gradient + row * V, 0, V * sizeof(T));
            continue;
        }
        const REAL most = stats[2 * row], share = stats[2 * row + 1], own = LOAD(of[labels[row]]);
        for (int64_t i = 0; i < V; i++) gradient[row * V + i] = STORE(EXP(LOAD(of[i]) - most) * share * factor);
        gradient[row * V + labels[row]] = STORE((EXP(own - most) * share - 1) * factor);
    }
}

#undef NAME
#undef LOAD
#undef STORE
#undef EXP
#undef BELOW
#endif
