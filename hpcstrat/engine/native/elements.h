/* Functions that add, compare, divide, convert and copy the elements of each type. The results have
 * the same bits as NumPy's results. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "loops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#define FENCE() _mm_sfence()
#else
#define RELAX() ((void)0)
#define FENCE() ((void)0)
#endif

typedef void (*binary)(void *, const void *, const void *, size_t);
typedef void (*convert)(void *, const void *, size_t);
typedef void (*scale)(void *, size_t, double);

#define ADDER(name, type)                                                                          \
    LOOPS static void name(void *out, const void *a, const void *b, size_t count) {                \
        type *total = out;                                                                         \
        const type *left = a, *right = b;                                                          \
        EACH(size_t i = 0; i < count; i++) total[i] = (type)(left[i] + right[i]);                  \
    }
ADDER(add_float, float)
ADDER(add_double, double)
/* Add signed integers as unsigned integers: in two's complement the sums have the same bits. */
ADDER(add_uint8, uint8_t)
ADDER(add_uint16, uint16_t)
ADDER(add_uint32, uint32_t)
ADDER(add_uint64, uint64_t)

static void add_complex64(void *out, const void *a, const void *b, size_t count) {
    add_float(out, a, b, 2 * count);
}

static void add_complex128(void *out, const void *a, const void *b, size_t count) {
    add_double(out, a, b, 2 * count);
}

/* Write the larger elements, for MAX and MIN, which compare the keys below. */
#define CHOOSER(name, type)                                                                        \
    LOOPS static void name(void *out, const void *a, const void *b, size_t count) {                \
        type *largest = out;                                                                       \
        const type *left = a, *right = b;                                                          \
        EACH(size_t i = 0; i < count; i++) largest[i] = left[i] > right[i] ? left[i] : right[i];   \
    }
CHOOSER(max_uint8, uint8_t)
CHOOSER(max_uint16, uint16_t)
CHOOSER(max_uint32, uint32_t)
CHOOSER(max_uint64, uint64_t)

/* Divide as NumPy does. For a power of two, multiply by its inverse: the bits are the same. */
#define SCALER(name, type)                                                                         \
    LOOPS static void name(void *values, size_t count, double divisor) {                           \
        type *sums = values;                                                                       \
        uint64_t whole = (uint64_t)divisor;                                                        \
        if (whole & (whole - 1)) {                                                                 \
            type by = (type)divisor;                                                               \
            EACH(size_t i = 0; i < count; i++) sums[i] = sums[i] / by;                             \
        } else {                                                                                   \
            type by = (type)(1 / divisor);                                                         \
            EACH(size_t i = 0; i < count; i++) sums[i] = sums[i] * by;                             \
        }                                                                                          \
    }
SCALER(scale_float, float)
SCALER(scale_double, double)

/* Divide as NumPy divides by a complex number whose imaginary part is 0. */
#define COMPLEX_SCALER(name, type)                                                                 \
    static void name(void *values, size_t count, double divisor) {                                 \
        type *sums = values, ratio = 0, by = 1 / (type)divisor;                                    \
        for (size_t i = 0; i < count; i++) {                                                       \
            type real = sums[2 * i], imaginary = sums[2 * i + 1];                                  \
            sums[2 * i] = (real + imaginary * ratio) * by;                                         \
            sums[2 * i + 1] = (imaginary - real * ratio) * by;                                     \
        }                                                                                          \
    }
COMPLEX_SCALER(scale_complex64, float)
COMPLEX_SCALER(scale_complex128, double)

#define CONVERTER(name, from, to)                                                                  \
    LOOPS static void name(void *out, const void *in, size_t count) {                              \
        to *result = out;                                                                          \
        const from *values = in;                                                                   \
        EACH(size_t i = 0; i < count; i++) result[i] = (to)values[i];                              \
    }
CONVERTER(int8_to_double, int8_t, double)
CONVERTER(uint8_to_double, uint8_t, double)
CONVERTER(int16_to_double, int16_t, double)
CONVERTER(uint16_to_double, uint16_t, double)
CONVERTER(int32_to_double, int32_t, double)
CONVERTER(uint32_to_double, uint32_t, double)
CONVERTER(int64_to_double, int64_t, double)
CONVERTER(uint64_to_double, uint64_t, double)

typedef union {
    uint32_t bits;
    float value;
} word;
#define FLOAT(b) (((word){.bits = (b)}).value)
#define BITS(v) (((word){.value = (v)}).bits)

LOOPS static void half_to_float(void *out, const void *in, size_t count) {
    uint32_t *result = out;
    const uint16_t *values = in;
    EACH(size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)(values[i] & 0x7fff) << 13;
        uint32_t exponent = bits & (0x7c00u << 13);
        uint32_t wide = bits + (112u << 23);
        uint32_t special = wide + (112u << 23);
        uint32_t subnormal = BITS(FLOAT(wide + (1u << 23)) - FLOAT(113u << 23));
        wide = exponent == (0x7c00u << 13) ? special : exponent ? wide : subnormal;
        result[i] = wide | (uint32_t)(values[i] & 0x8000) << 16;
    }
}

/* Round to nearest, ties to even. */
LOOPS static void float_to_half(void *out, const void *in, size_t count) {
    uint16_t *result = out;
    const uint32_t *values = in;
    const uint32_t infinity = 255u << 23, magic = 126u << 23;
    EACH(size_t i = 0; i < count; i++) {
        uint32_t sign = values[i] & 0x80000000u, bits = values[i] ^ sign;
        uint32_t payload = 0x7c00u + ((bits & 0x7fffffu) >> 13);
        payload += payload == 0x7c00u;
        uint32_t subnormal = BITS(FLOAT(bits) + FLOAT(magic)) - magic;
        uint32_t normal = (bits + 0xc8000fffu + (bits >> 13 & 1)) >> 13;
        uint32_t half = bits < 113u << 23 ? subnormal : normal;
        half = bits >= 143u << 23 ? 0x7c00u : half;
        half = bits > infinity ? payload : half;
        result[i] = (uint16_t)(half | sign >> 16);
    }
}

LOOPS static void bfloat16_to_float(void *out, const void *in, size_t count) {
    uint32_t *result = out;
    const uint16_t *values = in;
    EACH(size_t i = 0; i < count; i++) result[i] = (uint32_t)values[i] << 16;
}

LOOPS static void float_to_bfloat16(void *out, const void *in, size_t count) {
    uint16_t *result = out;
    const uint32_t *values = in;
    EACH(size_t i = 0; i < count; i++) {
        uint32_t bits = values[i];
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        uint32_t nan = (bits >> 16 & 0x8000u) | 0x7fc0u;
        result[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

/* Keys: unsigned integers whose largest value stands for the MAX or MIN of values, as in
 * hpcstrat/engine/arrays/order_keys.py. A key and its integer differ in the bits of a mask. */
#define KEYS_OF_INTEGERS(name, bits, mask)                                                         \
    LOOPS static void name(void *out, const void *in, size_t count) {                              \
        bits *result = out;                                                                        \
        const bits *values = in;                                                                   \
        EACH(size_t i = 0; i < count; i++) result[i] = values[i] ^ (bits)(mask);                   \
    }
#define MASKS(size, bits)                                                                          \
    KEYS_OF_INTEGERS(most_int##size, bits, (bits)1 << (size - 1))                                  \
    KEYS_OF_INTEGERS(least_int##size, bits, ~((bits)1 << (size - 1)))                              \
    KEYS_OF_INTEGERS(least_uint##size, bits, ~(bits)0)
MASKS(8, uint8_t)
MASKS(16, uint16_t)
MASKS(32, uint32_t)
MASKS(64, uint64_t)

/* Keys of floating-point numbers. `flip` is the sign bit for MIN, and 0 for MAX. The bits of NaNs,
 * without the sign, are larger than the bits of infinity; all NaNs become `nan`. */
#define KEYS_OF_FLOATS(name, bits, infinity, nan, flip)                                            \
    LOOPS static void to_##name(void *out, const void *in, size_t count) {                         \
        const bits sign = (bits)~((bits)~0 >> 1);                                                  \
        bits *keys = out;                                                                          \
        const bits *values = in;                                                                   \
        EACH(size_t i = 0; i < count; i++) {                                                       \
            bits value = values[i] ^ (flip ? sign : 0);                                            \
            bits key = value & sign ? (bits)~value : (bits)(value | sign);                         \
            keys[i] = (bits)(value & ~sign) > infinity ? (bits)~0 : key;                           \
        }                                                                                          \
    }                                                                                              \
    LOOPS static void from_##name(void *out, const void *in, size_t count) {                       \
        const bits sign = (bits)~((bits)~0 >> 1);                                                  \
        bits *values = out;                                                                        \
        const bits *keys = in;                                                                     \
        EACH(size_t i = 0; i < count; i++) {                                                       \
            bits value = keys[i] & sign ? (bits)(keys[i] ^ sign) : (bits)~keys[i];                 \
            value ^= flip ? sign : 0;                                                              \
            values[i] = (bits)(value & ~sign) > infinity ? nan : value;                            \
        }                                                                                          \
    }
#define KEYS(name, bits, infinity, nan)                                                            \
    KEYS_OF_FLOATS(most_##name, bits, infinity, nan, 0)                                            \
    KEYS_OF_FLOATS(least_##name, bits, infinity, nan, 1)
KEYS(half, uint16_t, 0x7c00, 0x7e00)
KEYS(bfloat16, uint16_t, 0x7f80, 0x7fc0)
KEYS(float, uint32_t, 0x7f800000, 0x7fc00000)
KEYS(double, uint64_t, 0x7ff0000000000000, 0x7ff8000000000000)

/* How values of a type are combined: added, or compared. Sizes in bytes: `size` of a value, `wide`
 * of a value while it is combined, `result` of a result. `widen` converts values before `combine`
 * and `narrow` converts results after it; they are NULL if no conversion is needed. */
typedef struct {
    size_t size, wide, result;
    binary combine;
    scale divide;
    convert widen, narrow;
} type;

/* The types, indexed by the codes of hpcstrat/engine/native/__init__.py: first floats, then sums of
 * integers, means of integers, MAX, and MIN. */
static const type TYPES[] = {
    {4, 4, 4, add_float, scale_float, NULL, NULL},
    {8, 8, 8, add_double, scale_double, NULL, NULL},
    {8, 8, 8, add_complex64, scale_complex64, NULL, NULL},
    {16, 16, 16, add_complex128, scale_complex128, NULL, NULL},
    {2, 4, 2, add_float, scale_float, half_to_float, float_to_half},
    {2, 4, 2, add_float, scale_float, bfloat16_to_float, float_to_bfloat16},
    {1, 1, 1, add_uint8, NULL, NULL, NULL},
    {2, 2, 2, add_uint16, NULL, NULL, NULL},
    {4, 4, 4, add_uint32, NULL, NULL, NULL},
    {8, 8, 8, add_uint64, NULL, NULL, NULL},
    {1, 8, 8, add_double, scale_double, int8_to_double, NULL},
    {1, 8, 8, add_double, scale_double, uint8_to_double, NULL},
    {2, 8, 8, add_double, scale_double, int16_to_double, NULL},
    {2, 8, 8, add_double, scale_double, uint16_to_double, NULL},
    {4, 8, 8, add_double, scale_double, int32_to_double, NULL},
    {4, 8, 8, add_double, scale_double, uint32_to_double, NULL},
    {8, 8, 8, add_double, scale_double, int64_to_double, NULL},
    {8, 8, 8, add_double, scale_double, uint64_to_double, NULL},
    {4, 4, 4, max_uint32, NULL, to_most_float, from_most_float},
    {8, 8, 8, max_uint64, NULL, to_most_double, from_most_double},
    {2, 2, 2, max_uint16, NULL, to_most_half, from_most_half},
    {2, 2, 2, max_uint16, NULL, to_most_bfloat16, from_most_bfloat16},
    {1, 1, 1, max_uint8, NULL, most_int8, most_int8},
    {2, 2, 2, max_uint16, NULL, most_int16, most_int16},
    {4, 4, 4, max_uint32, NULL, most_int32, most_int32},
    {8, 8, 8, max_uint64, NULL, most_int64, most_int64},
    {1, 1, 1, max_uint8, NULL, NULL, NULL},
    {2, 2, 2, max_uint16, NULL, NULL, NULL},
    {4, 4, 4, max_uint32, NULL, NULL, NULL},
    {8, 8, 8, max_uint64, NULL, NULL, NULL},
    {4, 4, 4, max_uint32, NULL, to_least_float, from_least_float},
    {8, 8, 8, max_uint64, NULL, to_least_double, from_least_double},
    {2, 2, 2, max_uint16, NULL, to_least_half, from_least_half},
    {2, 2, 2, max_uint16, NULL, to_least_bfloat16, from_least_bfloat16},
    {1, 1, 1, max_uint8, NULL, least_int8, least_int8},
    {2, 2, 2, max_uint16, NULL, least_int16, least_int16},
    {4, 4, 4, max_uint32, NULL, least_int32, least_int32},
    {8, 8, 8, max_uint64, NULL, least_int64, least_int64},
    {1, 1, 1, max_uint8, NULL, least_uint8, least_uint8},
    {2, 2, 2, max_uint16, NULL, least_uint16, least_uint16},
    {4, 4, 4, max_uint32, NULL, least_uint32, least_uint32},
    {8, 8, 8, max_uint64, NULL, least_uint64, least_uint64},
};
enum { NUM_TYPES = sizeof TYPES / sizeof *TYPES };

enum { LINE = 64 };

#if defined(__x86_64__)
/* Copy whole lines, to memory that begins with a line, by stores that bypass the cache. Stores of
 * 32 bytes take four fifths of the time of stores of 16 bytes. */
__attribute__((target("avx2"))) static void stream_wide(char *to, const char *from, size_t lines) {
    for (; lines; lines--, to += LINE, from += LINE) {
        __m256i low = _mm256_loadu_si256((const __m256i *)from),
                high = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm256_stream_si256((__m256i *)to, low);
        _mm256_stream_si256((__m256i *)(to + 32), high);
    }
}

static void stream_lines(char *to, const char *from, size_t lines) {
    if (__builtin_cpu_supports("avx2")) {
        stream_wide(to, from, lines);
        return;
    }
    for (size_t i = 0; i < lines * LINE; i += 16)
        _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
}
#endif

/* Copy bytes. If `past_cache` is true, the stores bypass the cache if the processor supports that,
 * and the caller must execute FENCE afterwards. */
static void copy(char *to, const char *from, size_t nbytes, int past_cache) {
    /* In one call, memcpy of glibc takes up to twice as long for several MiB. */
    enum { MOST = 64 << 10 };
#if defined(__x86_64__)
    size_t head = -(uintptr_t)to & (LINE - 1);
    if (past_cache && head < nbytes) {
        memcpy(to, from, head);
        to += head, from += head, nbytes -= head;
        size_t whole = nbytes & ~(size_t)(LINE - 1);
        stream_lines(to, from, whole / LINE);
        to += whole, from += whole, nbytes -= whole;
    }
#endif
    (void)past_cache;
    for (; nbytes > MOST; to += MOST, from += MOST, nbytes -= MOST) memcpy(to, from, MOST);
    memcpy(to, from, nbytes);
}
