// Steps of optimizers: every array of one type in one launch.
//
// An array is cut into chunks of CHUNK elements, and one block does one chunk at a time.
// `owners` has the array of each chunk; `spans` has WIDTH numbers of each array: the
// addresses of the variable and its state, its length, its first chunk, and whether it
// is marked (decays, for instance). Addresses of gradients, which change, are apart.
//
// Each operation rounds to the type of the arrays, in the order in which NumPy does it
// on the host, and is compiled without fused multiply-add, so that the bits are the
// same. Half types are computed in float, as NumPy and ml_dtypes do; what combined
// gradients are scaled by is not rounded to a half type, in which it could be 0.
//
// `update_kernels.py` compiles this for each TYPE apart, behind singles.cu, and gives it
// CHUNK, LANES and PARTS.
//
// Sums go lane by lane: element i of a chunk belongs to lane i % LANES, whatever the
// number of threads; and all orders are fixed. So equal bits give equal bits.

#define WIDTH 6

#define BATCH 4

#ifdef __CUDACC_RTC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

union Word {
    float real;
    unsigned int bits;
};

struct F32 {
    typedef float stored;
    typedef Float real;
    static __device__ real load(stored x) { return x; }
    static __device__ stored store(real x) { return x.value; }
    static __device__ real round(real x) { return x; }
    static __device__ real root(real x) { return single_root(x.value); }
};

struct F64 {
    typedef double stored;
    typedef double real;
    static __device__ real load(stored x) { return x; }
    static __device__ stored store(real x) { return x; }
    static __device__ real round(real x) { return x; }
    static __device__ real root(real x) { return sqrt(x); }
};

struct F16 {
    typedef unsigned short stored;
    typedef Float real;

#ifdef __CUDACC_RTC__
    static __device__ real load(stored x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    }

    static __device__ stored store(real x) {
        unsigned short y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x.value));
        return y;
    }
#else
    static __device__ real load(stored x) {
        Word word;
        unsigned int rest = x & 0x7fffu;
        if (rest >= 0x7c00u) {
            word.bits = 0x7f800000u | (rest & 0x3ffu) << 13;
        } else if (rest < 0x400u) {
            word.real = (float)rest * 5.9604644775390625e-8f;
        } else {
            word.bits = (rest << 13) + 0x38000000u;
        }
        word.bits |= (x & 0x8000u) << 16;
        return word.real;
    }

    static __device__ stored store(real x) {
        Word word;
        word.real = x.value;
        unsigned int sign = word.bits >> 16 & 0x8000u;
        word.bits &= 0x7fffffffu;
        if (word.bits > 0x7f800000u) return (stored)(sign | 0x7e00u);
        if (word.bits >= 0x477ff000u) return (stored)(sign | 0x7c00u);
        if (word.bits < 0x38800000u) {
            // The last place of 0.5 is that of the smallest numbers of the half type.
            word.real += 0.5f;
            return (stored)(sign | (word.bits - 0x3f000000u));
        }
        word.bits += 0xfffu + (word.bits >> 13 & 1u);
        return (stored)(sign | (word.bits - 0x38000000u) >> 13);
    }
#endif

    static __device__ real round(real x) { return load(store(x)); }
    static __device__ real root(real x) { return round(single_root(x.value)); }
};

struct BF16 {
    typedef unsigned short stored;
    typedef Float real;

    static __device__ real load(stored x) {
        Word word;
        word.bits = (unsigned int)x << 16;
        return word.real;
    }

    static __device__ stored store(real x) {
        Word word;
        word.real = x.value;
        if ((word.bits & 0x7fffffffu) > 0x7f800000u) {
            return (stored)((word.bits >> 16 & 0x8000u) | 0x7fc0u);
        }
        return (stored)((word.bits + 0x7fffu + (word.bits >> 16 & 1u)) >> 16);
    }

    static __device__ real round(real x) { return load(store(x)); }
    static __device__ real root(real x) { return round(single_root(x.value)); }
};

typedef TYPE K;
typedef K::real real;
typedef K::stored stored;

// What one block does at a time: a chunk of an array, with what belongs to it.
struct Piece {
    stored *gradient, *value, *first, *second;
    long long start, stop;
    int span;
    bool marked;
};

struct Spans {
    const long long *gradients, *spans;
    const int *owners;
    int chunks;
};

__device__ Piece piece_of(const Spans &all, int chunk) {
    Piece piece;
    piece.span = all.owners[chunk];
    const long long *row = all.spans + (long long)piece.span * WIDTH;
    piece.gradient = (stored *)all.gradients[piece.span];
    piece.value = (stored *)row[0];
    piece.first = (stored *)row[1];
    piece.second = (stored *)row[2];
    piece.start = (chunk - row[4]) * CHUNK;
    piece.stop = piece.start + CHUNK < row[3] ? piece.start + CHUNK : row[3];
    piece.marked = row[5] != 0;
    return piece;
}

// A rule sees one element: the gradient, and by reference the value and its state, of
// which it has 0, 1 or 2 arrays.
template <typename Rule>
__device__ void update(const Spans &all, real mean, const double *factor,
                       const Rule &rule) {
    const real clip = factor ? (real)*factor : (real)1;
    for (int chunk = blockIdx.x; chunk < all.chunks; chunk += gridDim.x) {
        const Piece piece = piece_of(all, chunk);
        const int count = (int)(piece.stop - piece.start), step = blockDim.x;
        const stored *gradients = piece.gradient + piece.start;
        stored *values = piece.value + piece.start;
        stored *firsts = piece.first + piece.start, *seconds = piece.second + piece.start;
        for (int low = threadIdx.x; low < count; low += BATCH * step) {
            stored gradient[BATCH], value[BATCH], first[BATCH], second[BATCH];
            // All loads are under way before the first store.
            UNROLL
            for (int k = 0; k < BATCH; ++k) {
                const int i = low + k * step;
                if (i >= count) continue;
                gradient[k] = gradients[i];
                value[k] = values[i];
                if (Rule::states > 0) first[k] = firsts[i];
                if (Rule::states > 1) second[k] = seconds[i];
            }
            UNROLL
            for (int k = 0; k < BATCH; ++k) {
                const int i = low + k * step;
                if (i >= count) continue;
                real g = K::load(gradient[k]), x = K::load(value[k]);
                real a = Rule::states > 0 ? K::load(first[k]) : (real)0;
                real b = Rule::states > 1 ? K::load(second[k]) : (real)0;
                g = K::round(g * mean);
                g = K::round(g * clip);
                rule(g, x, a, b, piece.marked);
                values[i] = K::store(x);
                if (Rule::states > 0) firsts[i] = K::store(a);
                if (Rule::states > 1) seconds[i] = K::store(b);
            }
        }
    }
}

struct Sgd {
    enum { states = 0 };
    real rate;
    __device__ void operator()(real g, real &x, real &, real &, bool) const {
        g = K::round(g * rate);
        x = K::round(x + g);
    }
};

struct Momentum {
    enum { states = 1 };
    real rate, momentum;
    __device__ void operator()(real g, real &x, real &v, real &, bool) const {
        g = K::round(g * rate);
        v = K::round(v * momentum);
        v = K::round(v + g);
        x = K::round(x + v);
    }
};

struct Nesterov {
    enum { states = 1 };
    real rate, momentum;
    __device__ void operator()(real g, real &x, real &v, real &, bool) const {
        g = K::round(g * rate);
        v = K::round(v * momentum);
        v = K::round(v + g);
        g = K::round(g + K::round(v * momentum));
        x = K::round(x + g);
    }
};

struct Adagrad {
    enum { states = 1 };
    real rate, epsilon;
    __device__ void operator()(real g, real &x, real &s, real &, bool) const {
        s = K::round(s + K::round(g * g));
        real root = K::round(K::root(s) + epsilon);
        g = K::round(g / root);
        g = K::round(g * rate);
        x = K::round(x - g);
    }
};

struct Adam {
    real kept_1, new_1, kept_2, new_2, epsilon, correction_1, correction_2;

    __device__ real direction(real g, real &m, real &v) const {
        m = K::round(m * kept_1);
        m = K::round(m + K::round(g * new_1));
        g = K::round(g * g);
        g = K::round(g * new_2);
        v = K::round(v * kept_2);
        v = K::round(v + g);
        real root = K::round(K::root(v) / correction_2);
        root = K::round(root + epsilon);
        g = K::round(m / root);
        return K::round(g / correction_1);
    }
};

struct AdamStep {
    enum { states = 2 };
    Adam adam;
    real rate, kept;
    __device__ void operator()(real g, real &x, real &m, real &v, bool decays) const {
        if (decays) x = K::round(x * kept);
        g = adam.direction(g, m, v);
        g = K::round(g * rate);
        x = K::round(x - g);
    }
};

struct Sum {
    enum { states = 0 };
    __device__ void operator()(real g, real &x, real &, real &, bool) const {
        x = K::round(x + g);
    }
};

#define SPANS                                                                           \
    const long long *gradients, const long long *spans, const int *owners, int chunks
#define ALL Spans{gradients, spans, owners, chunks}
#define ADAM                                                                            \
    real new_1, real kept_1, real new_2, real kept_2, real correction_2, real epsilon,  \
        real correction_1
#define MAKE_ADAM                                                                       \
    Adam { kept_1, new_1, kept_2, new_2, epsilon, correction_1, correction_2 }

extern "C" __global__ void sgd(SPANS, real mean, const double *factor, real rate) {
    update(ALL, mean, factor, Sgd{rate});
}

extern "C" __global__ void momentum(SPANS, real mean, const double *factor, real rate,
                                    real kept) {
    update(ALL, mean, factor, Momentum{rate, kept});
}

extern "C" __global__ void nesterov(SPANS, real mean, const double *factor, real rate,
                                    real kept) {
    update(ALL, mean, factor, Nesterov{rate, kept});
}

extern "C" __global__ void adagrad(SPANS, real mean, const double *factor, real rate,
                                   real epsilon) {
    update(ALL, mean, factor, Adagrad{rate, epsilon});
}

extern "C" __global__ void adam(SPANS, real mean, const double *factor, ADAM, real rate,
                                real kept) {
    update(ALL, mean, factor, AdamStep{MAKE_ADAM, rate, kept});
}

extern "C" __global__ void add(SPANS) {
    update(ALL, (real)1, (const double *)0, Sum());
}

extern "C" __global__ void clear(SPANS) {
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece piece = piece_of(ALL, chunk);
        for (long long i = piece.start + threadIdx.x; i < piece.stop; i += blockDim.x) {
            piece.value[i] = 0;
        }
    }
}

extern "C" __global__ void scale(SPANS, real mean, const double *factor) {
    const real clip = factor ? (real)*factor : (real)1;
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece piece = piece_of(ALL, chunk);
        for (long long i = piece.start + threadIdx.x; i < piece.stop; i += blockDim.x) {
            real g = K::round(K::load(piece.gradient[i]) * mean);
            piece.gradient[i] = K::store(K::round(g * clip));
        }
    }
}

extern "C" __global__ void look(SPANS, int *found) {
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece piece = piece_of(ALL, chunk);
        bool finite = true;
        for (long long i = piece.start + threadIdx.x; i < piece.stop; i += blockDim.x) {
            const real x = K::load(piece.gradient[i]);
            finite = finite && x - x == (real)0;
        }
        // Whoever writes, writes the same.
        if (!finite) *found = 1;
    }
}

// The sums of the squares of each lane of each chunk, of the gradients as they are
// after the mean: sums[lane * stride + chunk].
extern "C" __global__ void squares(SPANS, real mean, double *sums, int stride) {
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece piece = piece_of(ALL, chunk);
        for (int lane = threadIdx.x; lane < LANES; lane += blockDim.x) {
            double sum = 0;
            for (long long i = piece.start + lane; i < piece.stop; i += LANES) {
                const real g = K::round(K::load(piece.gradient[i]) * mean);
                sum += (double)g * (double)g;
            }
            sums[(long long)lane * stride + chunk] = sum;
        }
    }
}

// The first half of LAMB: the moments, the direction in the gradient's place, and the
// squares of the values and of the directions of what is marked.
extern "C" __global__ void lamb_direction(SPANS, real mean, const double *factor, ADAM,
                                          real decay, double *values,
                                          double *directions) {
    const Adam adam = MAKE_ADAM;
    const real clip = factor ? (real)*factor : (real)1;
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece piece = piece_of(ALL, chunk);
        for (int lane = threadIdx.x; lane < LANES; lane += blockDim.x) {
            double value = 0, direction = 0;
            for (long long i = piece.start + lane; i < piece.stop; i += LANES) {
                real g = K::round(K::load(piece.gradient[i]) * mean);
                g = K::round(g * clip);
                real m = K::load(piece.first[i]), v = K::load(piece.second[i]);
                g = adam.direction(g, m, v);
                piece.first[i] = K::store(m);
                piece.second[i] = K::store(v);
                if (piece.marked) {
                    const real x = K::load(piece.value[i]);
                    g = K::round(g + K::round(x * decay));
                    value += (double)x * (double)x;
                    direction += (double)g * (double)g;
                }
                piece.gradient[i] = K::store(g);
            }
            values[(long long)lane * chunks + chunk] = value;
            directions[(long long)lane * chunks + chunk] = direction;
        }
    }
}

extern "C" __global__ void lamb_step(SPANS, const double *rates) {
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece piece = piece_of(ALL, chunk);
        const real rate = K::round((real)rates[piece.span]);
        for (long long i = piece.start + threadIdx.x; i < piece.stop; i += blockDim.x) {
            const real g = K::round(K::load(piece.gradient[i]) * rate);
            piece.value[i] = K::store(K::round(K::load(piece.value[i]) - g));
        }
    }
}

// The sums of rows that come several times, each in the order in which they came:
// row `order[j]` for starts[r] <= j < starts[r + 1] belongs to row r of the result.
extern "C" __global__ void sum_rows(const stored *rows, const long long *order,
                                    const long long *starts, stored *results,
                                    long long count, long long width) {
    const long long size = count * width;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size;
         i += step) {
        const long long row = i / width, column = i % width;
        real sum = 0;
        for (long long j = starts[row]; j < starts[row + 1]; ++j) {
            sum = K::round(sum + K::load(rows[order[j] * width + column]));
        }
        results[i] = K::store(sum);
    }
}

// Adds up the lanes of each column: sums[column].
extern "C" __global__ void fold_lanes(const double *lanes, int columns, double *sums) {
    const int step = gridDim.x * blockDim.x;
    for (int column = blockIdx.x * blockDim.x + threadIdx.x; column < columns;
         column += step) {
        double sum = 0;
        for (int lane = 0; lane < LANES; ++lane) {
            sum += lanes[(long long)lane * columns + column];
        }
        sums[column] = sum;
    }
}

// Adds up every PARTS-th number from each start, for arrays whose chunks are one after
// the other: array r has the chunks from firsts[r] to firsts[r + 1].
extern "C" __global__ void fold_chunks(const double *chunks, const int *firsts, int count,
                                       double *parts) {
    const int step = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count * PARTS; i += step) {
        double sum = 0;
        const int stop = firsts[i / PARTS + 1];
        for (int chunk = firsts[i / PARTS] + i % PARTS; chunk < stop; chunk += PARTS) {
            sum += chunks[chunk];
        }
        parts[i] = sum;
    }
}

// The factor that makes a norm at most `limit`: NaN for a norm that is not finite.
extern "C" __global__ void clip_factor(const double *parts, double more, double limit,
                                       double *factor) {
    if (blockIdx.x || threadIdx.x) return;
    double total = 0;
    for (int part = 0; part < PARTS; ++part) total += parts[part];
    const double norm = sqrt(total + more);
    factor[0] = norm <= limit ? 1 : norm - norm == 0 ? limit / norm : norm - norm;
    factor[1] = total;
}

// LAMB's rate of each array.
extern "C" __global__ void lamb_rates(const double *values, const double *directions,
                                      int count, double rate, double *rates) {
    const int step = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        double value = 0, direction = 0;
        for (int part = 0; part < PARTS; ++part) {
            value += values[i * PARTS + part];
            direction += directions[i * PARTS + part];
        }
        const bool trusted = value != 0 && direction != 0;
        rates[i] = trusted ? rate * (sqrt(value) / sqrt(direction)) : rate;
    }
}
