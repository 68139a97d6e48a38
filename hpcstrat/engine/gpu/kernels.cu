// Copies between arrays and a contiguous buffer, and the sum of two arrays.
//
// One launch copies many arrays, which are consecutive in the buffer. The buffer is cut
// into chunks of equal size; a CUDA block copies one chunk at a time, and finds the
// arrays in the chunk by bisection. If an array and its part of the buffer have the
// same alignment within a 16-byte word, whole words are copied.
//
// STORED is the type of the arrays, and WIRE the type of the buffer; kernels.py defines
// both.
//
// The compiler must not contract products and sums (FMA), so that all ranks get the
// same bits. Quotients are rounded in the same way as in NumPy.

typedef long long Index;
typedef unsigned long long Address;
typedef unsigned int Word;

#define MOST_SPANS 208
#define BATCH 4
#define CROWD 8

#ifdef __CUDACC_RTC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

// ---- Single precision, including subnormal numbers

// CuPy adds -ftz=true after our options (cupy/cupy issue 9576), so that float
// operations would flush subnormal numbers to zero. PTX instructions are not affected:
// "subnormal numbers are supported" without .ftz (PTX ISA, section "add").
#ifdef __CUDACC_RTC__
#define SINGLE(name, symbol, instruction)                                              \
    __device__ inline float name(float one, float other) {                             \
        float result;                                                                  \
        asm(instruction " %0, %1, %2;" : "=f"(result) : "f"(one), "f"(other));         \
        return result;                                                                 \
    }
#else
#define SINGLE(name, symbol, instruction)                                              \
    inline float name(float one, float other) { return one symbol other; }
#endif

SINGLE(single_sum, +, "add.rn.f32")
SINGLE(single_difference, -, "sub.rn.f32")
SINGLE(single_product, *, "mul.rn.f32")
SINGLE(single_quotient, /, "div.rn.f32")

struct Float {
    float value;

    Float() = default;
    template <class T> __device__ Float(T number) : value((float)number) {}
};

__device__ inline Float operator+(Float one, Float other) {
    return single_sum(one.value, other.value);
}

__device__ inline Float operator-(Float one, Float other) {
    return single_difference(one.value, other.value);
}

__device__ inline Float operator*(Float one, Float other) {
    return single_product(one.value, other.value);
}

__device__ inline Float operator/(Float one, Float other) {
    return single_quotient(one.value, other.value);
}

// ---- Other types

// The consecutive parts of the buffer that one launch copies, called spans. `starts`
// has the first element of each span in the buffer, and finally the end of the buffer.
// `arrays` has the address of each span in its array.
struct Spans {
    Index count;
    Index starts[MOST_SPANS + 1];
    Address arrays[MOST_SPANS];
};

struct Half {
    unsigned short bits;
};

struct Brain {
    unsigned short bits;
};

template <class T> struct Complex {
    T re, im;
};

// Numbers that are copied together, as one word.
template <class T, int LANES> struct alignas(sizeof(T) * LANES) Group {
    enum { COUNT = LANES };
    T lane[LANES];
};

// One number at any address. A complex number may be aligned only to the size of its
// parts; copying it as one word would then be a misaligned access, which ends the CUDA
// context.
template <class T> struct Group<T, 0> {
    enum { COUNT = 1 };
    T lane[1];
};

// Returns how many numbers precede an address in its word, or -1 if the address is not
// a multiple of the number's size.
template <class T, int LANES> __device__ inline int place_of(Address address) {
    if (address % sizeof(T)) return -1;
    return (int)((address & (sizeof(T) * LANES - 1)) / sizeof(T));
}

// Stores a group by one instruction; the compiler would store its numbers one by one.
template <class T, int LANES>
__device__ inline void store(Group<T, LANES>* at, const Group<T, LANES>& group) {
#ifdef __CUDACC_RTC__
    enum { BYTES = sizeof(T) * LANES };
    union {
        Group<T, LANES> group;
        Word words[4];
    } all;
    all.group = group;
    const Word* words = all.words;
    if (BYTES == 16) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                       "r"(words[3])
                     : "memory");
    } else if (BYTES == 8) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};"
                     :
                     : "l"(at), "r"(words[0]), "r"(words[1])
                     : "memory");
    } else if (BYTES == 4) {
        *(Word*)at = words[0];
    } else {
        *at = group;
    }
#else
    *at = group;
#endif
}

union Single {
    float value;
    Word bits;
};

// How many numbers of the wider of two types fit in a 16-byte word.
template <class A, class B> struct Lanes {
    enum { COUNT = 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B)) };
};

// ---- Conversions, rounded to nearest, ties to even

template <class Out, class In> struct Convert {
    static __device__ Out from(In value) { return (Out)value; }
};

template <> struct Convert<Float, Half> {
    static __device__ Float from(Half value) {
        Single single;
#ifdef __CUDACC_RTC__
        asm("cvt.f32.f16 %0, %1;" : "=f"(single.value) : "h"(value.bits));
#else
        Word sign = (Word)(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
        if (rest >= 0x7c00u) {
            single.bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
        } else if (rest >= 0x400u) {
            single.bits = sign | (rest << 13) + (112u << 23);
        } else {
            // A subnormal half is a multiple of 2**-24.
            single.value = (float)rest * 5.9604644775390625e-8f;
            single.bits |= sign;
        }
#endif
        return single.value;
    }
};

template <> struct Convert<Half, Float> {
    static __device__ Half from(Float value) {
        Half half;
#ifdef __CUDACC_RTC__
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value.value));
#else
        Single single;
        single.value = value.value;
        Word sign = single.bits >> 16 & 0x8000u, rest = single.bits & 0x7fffffffu;
        if (rest > 0x7f800000u) {
            rest = 0x7e00u;
        } else if (rest >= 0x477ff000u) {
            // The value rounds to 2**16 or more: infinity.
            rest = 0x7c00u;
        } else if (rest >= 0x38800000u) {
            rest = rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u) >> 13;
        } else if (rest < 0x33000000u) {
            rest = 0;
        } else {
            Word shift = 126u - (rest >> 23), whole = (rest & 0x7fffffu) | 0x800000u;
            Word kept = whole >> shift, lost = whole & ((1u << shift) - 1u);
            Word middle = 1u << (shift - 1u);
            rest = kept + (lost > middle || (lost == middle && (kept & 1u)));
        }
        half.bits = (unsigned short)(sign | rest);
#endif
        return half;
    }
};

template <> struct Convert<Float, Brain> {
    static __device__ Float from(Brain value) {
        Single single;
        single.bits = (Word)value.bits << 16;
        return single.value;
    }
};

template <> struct Convert<Brain, Float> {
    static __device__ Brain from(Float value) {
        Single single;
        single.value = value.value;
        Word bits = single.bits;
        Brain brain;
        if ((bits & 0x7fffffffu) > 0x7f800000u) {
            brain.bits = (unsigned short)((bits >> 16 & 0x8000u) | 0x7fc0u);
        } else {
            brain.bits = (unsigned short)(bits + 0x7fffu + (bits >> 16 & 1u) >> 16);
        }
        return brain;
    }
};

// ---- Sums and quotients

template <class T> __device__ inline T added(T one, T other) { return one + other; }

template <class T>
__device__ inline Complex<T> added(Complex<T> one, Complex<T> other) {
    Complex<T> sum;
    sum.re = one.re + other.re;
    sum.im = one.im + other.im;
    return sum;
}

template <class T> __device__ inline T added_in_single(T one, T other) {
    return Convert<T, Float>::from(Convert<Float, T>::from(one) +
                                   Convert<Float, T>::from(other));
}

__device__ inline Half added(Half one, Half other) {
    return added_in_single(one, other);
}

__device__ inline Brain added(Brain one, Brain other) {
    return added_in_single(one, other);
}

// Integers and half types are never divided: means of integers are computed in double,
// and means of half types in Float.
template <class T> struct Quotient {
    __device__ explicit Quotient(Index) {}
    __device__ T operator()(T value) const { return value; }
};

template <class T> struct RealQuotient {
    T divisor, factor;
    bool divides, scales;

    __device__ explicit RealQuotient(Index number) {
        divisor = (T)number;
        divides = number != 0;
        // For powers of two, multiplying by the reciprocal gives exactly the quotient.
        scales = divides && (number & (number - 1)) == 0;
        factor = scales ? (T)1 / divisor : (T)1;
    }

    __device__ T operator()(T value) const {
        if (scales) return value * factor;
        return divides ? value / divisor : value;
    }
};

template <> struct Quotient<Float> : RealQuotient<Float> {
    __device__ explicit Quotient(Index number) : RealQuotient<Float>(number) {}
};

template <> struct Quotient<double> : RealQuotient<double> {
    __device__ explicit Quotient(Index number) : RealQuotient<double>(number) {}
};

// The same operations as in NumPy's division by a complex number with imaginary part 0.
template <class T> struct Quotient<Complex<T> > {
    T factor;
    bool divides;

    __device__ explicit Quotient(Index number) {
        divides = number != 0;
        factor = divides ? (T)1 / (T)number : (T)1;
    }

    __device__ Complex<T> operator()(Complex<T> value) const {
        if (!divides) return value;
        Complex<T> result;
        result.re = (value.re + value.im * (T)0) * factor;
        result.im = (value.im - value.re * (T)0) * factor;
        return result;
    }
};

// ---- Copying one part of one array

// A source of values: the elements of an array.
template <class T> struct Plain {
    typedef T Value;
    Address begin;

    template <int LANES> __device__ Group<T, LANES> get(Index index) const {
        return *(const Group<T, LANES>*)(begin + index * (Index)sizeof(T));
    }

    template <int LANES> __device__ int offset() const {
        return place_of<T, LANES>(begin);
    }
};

// A source of values: the sums of two arrays, element by element.
template <class T> struct Pair {
    typedef T Value;
    Plain<T> one, other;

    template <int LANES> __device__ Group<T, LANES> get(Index index) const {
        typedef Group<T, LANES> Some;
        Some sum = one.template get<LANES>(index);
        const Some more = other.template get<LANES>(index);
        UNROLL
        for (int k = 0; k < Some::COUNT; ++k)
            sum.lane[k] = added(sum.lane[k], more.lane[k]);
        return sum;
    }

    // Returns -1 if the two arrays have different alignments within their words.
    template <int LANES> __device__ int offset() const {
        const int first = one.template offset<LANES>();
        return first == other.template offset<LANES>() ? first : -1;
    }
};

template <class T, class W, int LANES>
__device__ inline void put(T* out, Index index, Group<W, LANES> values,
                           const Quotient<W>& quotient) {
    typedef Group<T, LANES> Some;
    Some some;
    UNROLL
    for (int k = 0; k < Some::COUNT; ++k)
        some.lane[k] = Convert<T, W>::from(quotient(values.lane[k]));
    store((Some*)(out + index), some);
}

template <class T, class Source>
__device__ void move(T* out, const Source& source, Index count,
                     const Quotient<typename Source::Value>& quotient) {
    typedef typename Source::Value W;
    enum { LANES = Lanes<T, W>::COUNT };
    const Index step = blockDim.x;
    int before = place_of<T, LANES>((Address)out);
    Index head = count, groups = 0;
    if (before >= 0 && before == source.template offset<LANES>()) {
        head = (LANES - before) % LANES;
        if (head > count) head = count;
        groups = (count - head) / LANES;
    }
    for (Index i = threadIdx.x; i < head; i += step)
        put(out, i, source.template get<0>(i), quotient);
    Index group = threadIdx.x;
    // Issue several loads before the first store.
    for (; group + (BATCH - 1) * step < groups; group += BATCH * step) {
        Group<W, LANES> some[BATCH];
        UNROLL
        for (int k = 0; k < BATCH; ++k)
            some[k] = source.template get<LANES>(head + (group + k * step) * LANES);
        UNROLL
        for (int k = 0; k < BATCH; ++k)
            put(out, head + (group + k * step) * LANES, some[k], quotient);
    }
    for (; group < groups; group += step)
        put(out, head + group * LANES, source.template get<LANES>(head + group * LANES),
            quotient);
    for (Index i = head + groups * LANES + threadIdx.x; i < count; i += step)
        put(out, i, source.template get<0>(i), quotient);
}

// ---- Copies of all spans of a launch

// Returns the last span, from span `low` on, that begins at or before an element.
__device__ inline Index span_of(const Spans& spans, Index element, Index low) {
    Index high = spans.count;
    while (high - low > 1) {
        Index middle = (low + high) / 2;
        if (spans.starts[middle] <= element)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ inline bool is_crowded(const Spans& spans, Index span, Index end) {
    Index next = span + CROWD < spans.count ? span + CROWD : spans.count;
    return spans.starts[next] < end;
}

// Copies from the arrays to the buffer, or from the buffer to the arrays.
template <class Out, class In, bool PACKS>
__device__ void copy_all(const Spans& spans, Address buffer, Index divisor,
                         Index chunk) {
    const Quotient<In> quotient(divisor);
    const Index array_size = PACKS ? sizeof(In) : sizeof(Out);
    const Index buffer_size = PACKS ? sizeof(Out) : sizeof(In);
    const Index total = spans.starts[spans.count];
    for (Index low = blockIdx.x * chunk; low < total; low += gridDim.x * chunk) {
        Index end = low + chunk < total ? low + chunk : total;
        Index span = span_of(spans, low, 0);
        // If a chunk has many small arrays, each thread finds the array of its element.
        const bool crowded = is_crowded(spans, span, end);
        for (Index i = crowded ? low + threadIdx.x : low; i < end;) {
            if (crowded) span = span_of(spans, i, span);
            Index stop = spans.starts[span + 1] < end ? spans.starts[span + 1] : end;
            Address array = spans.arrays[span] + (i - spans.starts[span]) * array_size;
            Address place = buffer + i * buffer_size;
            Out* out = (Out*)(PACKS ? place : array);
            Plain<In> source = {PACKS ? array : place};
            if (crowded) {
                put(out, 0, source.template get<0>(0), quotient);
                i += blockDim.x;
            } else {
                move(out, source, stop - i, quotient);
                i = stop;
                ++span;
            }
        }
    }
}

// ---- The kernels

extern "C" __global__ void pack(Spans spans, Address out, Index chunk) {
    copy_all<WIRE, STORED, true>(spans, out, 0, chunk);
}

extern "C" __global__ void unpack(Spans spans, Address from, Index divisor,
                                  Index chunk) {
    copy_all<STORED, WIRE, false>(spans, from, divisor, chunk);
}

extern "C" __global__ void add(Address one, Address other, Address out, Index count,
                               Index chunk) {
    const Quotient<WIRE> nothing(0);
    for (Index low = blockIdx.x * chunk; low < count; low += gridDim.x * chunk) {
        Index end = low + chunk < count ? low + chunk : count;
        Index shift = low * (Index)sizeof(WIRE);
        Pair<WIRE> source = {{one + shift}, {other + shift}};
        move((WIRE*)out + low, source, end - low, nothing);
    }
}
