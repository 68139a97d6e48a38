// Copies between arrays and a contiguous buffer, and sums of buffers in a fixed order.
//
// Any number of arrays is served by one launch. They lie one behind the other in the
// buffer, which is cut into chunks of equal size; a block does one chunk at a time, and
// finds the arrays in it by bisection. Where an array and its part of the buffer begin
// at the same place of a 16-byte word, whole words are moved.
//
// STORED is the type of the arrays, WIRE that of the buffer; kernels.py defines them, and
// puts singles.cu before this.
//
// Sums are taken in the order of their terms, and nothing is contracted, so that all
// ranks find the same bits. Quotients are rounded as NumPy rounds them.

typedef long long Index;
typedef unsigned long long Address;
typedef unsigned int Word;

#define MOST_TERMS 32
#define FEW_SPANS 24
#define MANY_SPANS 208
#define BATCH 4
#define CROWD 8

#ifdef __CUDACC_RTC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

// Where the arrays begin in the buffer, and at the end where the last one ends; and
// their addresses.
template <int SPANS> struct Spans {
    Index count;
    Index starts[SPANS + 1];
    Address arrays[SPANS];
};

typedef Spans<FEW_SPANS> FewSpans;
typedef Spans<MANY_SPANS> ManySpans;

struct LongSpans {
    Index count;
    const Index* starts;
    const Address* arrays;
};

// One buffer in `parts` segments, which begin at these elements of it; or, in one part,
// the sum of `terms` buffers.
struct Buffers {
    Index parts;
    Index terms;
    Index firsts[MOST_TERMS + 1];
    Address pointers[MOST_TERMS];
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

// Numbers that are moved at once, as one word.
template <class T, int LANES> struct alignas(sizeof(T) * LANES) Group {
    enum { COUNT = LANES };
    T lane[LANES];
};

// One number anywhere: a complex one may begin at a multiple of its parts only, and to
// move it as a word from there would end the context.
template <class T> struct Group<T, 0> {
    enum { COUNT = 1 };
    T lane[1];
};

// How many numbers of their word lie before an address; -1 where they lie in no word.
template <class T, int LANES> __device__ inline int place_of(Address address) {
    if (address % sizeof(T)) return -1;
    return (int)((address & (sizeof(T) * LANES - 1)) / sizeof(T));
}

// Stores a group at once, where the compiler would store its lanes one by one.
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

// Whole words of the wider of two types.
template <class A, class B> struct Lanes {
    enum { COUNT = 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B)) };
};

// ---- Conversions, to the nearest and of two the even one

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
            // A subnormal number counts units of 2**-24.
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
            // Rounds to 2**16 or beyond.
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

// Integers are never divided, as their mean is taken in double, nor are half types.
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
        // For powers of two the product is the quotient, to the last bit.
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

// As NumPy divides by a complex number without an imaginary part.
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

// ---- Moving one part of one array

// Elements of an array.
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

// Elements of a sum of buffers, from `at` on; of one alone, its elements.
template <class T> struct Sum {
    typedef T Value;
    const Address* pointers;
    int terms;
    Index at;

    template <int LANES> __device__ Group<T, LANES> get(Index index) const {
        typedef Group<T, LANES> Some;
        Index shift = (at + index) * (Index)sizeof(T);
        Some sum = *(const Some*)(pointers[0] + shift);
        for (int term = 1; term < terms; ++term) {
            Some more = *(const Some*)(pointers[term] + shift);
            UNROLL
            for (int k = 0; k < Some::COUNT; ++k)
                sum.lane[k] = added(sum.lane[k], more.lane[k]);
        }
        return sum;
    }

    // How many elements before the place of the first one lie in its word; -1 where
    // that differs between the buffers.
    template <int LANES> __device__ int offset() const {
        const Address mask = sizeof(T) * LANES - 1;
        Address first = pointers[0] + (Address)at * sizeof(T), odd = 0;
        for (int term = 1; term < terms; ++term)
            odd |= (pointers[term] ^ pointers[0]) & mask;
        return odd ? -1 : place_of<T, LANES>(first);
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
    // Several loads are under way before the first store.
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

// ---- Walks over the spans of a call

// The last of the spans, from `low` on, that begins at an element or before.
template <class Table>
__device__ inline Index span_of(const Table& table, Index element, Index low) {
    Index high = table.count;
    while (high - low > 1) {
        Index middle = (low + high) / 2;
        if (table.starts[middle] <= element)
            low = middle;
        else
            high = middle;
    }
    return low;
}

template <class Table>
__device__ inline bool is_crowded(const Table& table, Index span, Index end) {
    Index next = span + CROWD < table.count ? span + CROWD : table.count;
    return table.starts[next] < end;
}

template <class W, class T, class Table>
__device__ void pack_all(const Table& table, Address out, Index chunk) {
    const Quotient<T> nothing(0);
    W* buffer = (W*)out;
    Index total = table.starts[table.count];
    for (Index low = blockIdx.x * chunk; low < total; low += gridDim.x * chunk) {
        Index end = low + chunk < total ? low + chunk : total;
        Index span = span_of(table, low, 0);
        if (is_crowded(table, span, end)) {
            for (Index i = low + threadIdx.x; i < end; i += blockDim.x) {
                Index own = span_of(table, i, span);
                const T* array = (const T*)table.arrays[own];
                buffer[i] = Convert<W, T>::from(array[i - table.starts[own]]);
            }
            continue;
        }
        for (Index i = low; i < end; ++span) {
            Index stop = table.starts[span + 1] < end ? table.starts[span + 1] : end;
            Address array = table.arrays[span];
            Plain<T> source = {array + (i - table.starts[span]) * (Index)sizeof(T)};
            if (i < stop) move(buffer + i, source, stop - i, nothing);
            i = stop;
        }
    }
}

template <class T, class W, class Table>
__device__ void unpack_all(const Table& table, const Buffers& buffers, Index divisor,
                           Index chunk) {
    const Quotient<W> quotient(divisor);
    Index total = table.starts[table.count];
    for (Index low = blockIdx.x * chunk; low < total; low += gridDim.x * chunk) {
        Index end = low + chunk < total ? low + chunk : total, part = 0;
        while (part + 1 < buffers.parts && buffers.firsts[part + 1] <= low) ++part;
        Index span = span_of(table, low, 0);
        if (is_crowded(table, span, end)) {
            for (Index i = low + threadIdx.x; i < end; i += blockDim.x) {
                while (part + 1 < buffers.parts && buffers.firsts[part + 1] <= i)
                    ++part;
                Index own = span_of(table, i, span);
                T* array = (T*)table.arrays[own];
                Sum<W> sum = {buffers.pointers + part, (int)buffers.terms,
                              i - buffers.firsts[part]};
                put(array, i - table.starts[own], sum.template get<0>(0), quotient);
            }
            continue;
        }
        for (Index i = low; i < end;) {
            if (table.starts[span + 1] <= i) {
                ++span;
                continue;
            }
            if (part + 1 < buffers.parts && buffers.firsts[part + 1] <= i) {
                ++part;
                continue;
            }
            Index stop = table.starts[span + 1] < end ? table.starts[span + 1] : end;
            if (part + 1 < buffers.parts && buffers.firsts[part + 1] < stop)
                stop = buffers.firsts[part + 1];
            T* array = (T*)table.arrays[span];
            Sum<W> sum = {buffers.pointers + part, (int)buffers.terms,
                          i - buffers.firsts[part]};
            move(array + (i - table.starts[span]), sum, stop - i, quotient);
            i = stop;
        }
    }
}

// ---- The kernels

extern "C" __global__ void pack_few(FewSpans spans, Address out, Index chunk) {
    pack_all<WIRE, STORED>(spans, out, chunk);
}

extern "C" __global__ void pack_many(ManySpans spans, Address out, Index chunk) {
    pack_all<WIRE, STORED>(spans, out, chunk);
}

extern "C" __global__ void pack_long(LongSpans spans, Address out, Index chunk) {
    pack_all<WIRE, STORED>(spans, out, chunk);
}

extern "C" __global__ void unpack_few(FewSpans spans, Buffers from, Index divisor,
                                      Index chunk) {
    unpack_all<STORED, WIRE>(spans, from, divisor, chunk);
}

extern "C" __global__ void unpack_many(ManySpans spans, Buffers from, Index divisor,
                                       Index chunk) {
    unpack_all<STORED, WIRE>(spans, from, divisor, chunk);
}

extern "C" __global__ void unpack_long(LongSpans spans, Buffers from, Index divisor,
                                       Index chunk) {
    unpack_all<STORED, WIRE>(spans, from, divisor, chunk);
}

extern "C" __global__ void sum_terms(Buffers from, Address out, Index count,
                                     Index chunk) {
    const Quotient<WIRE> nothing(0);
    for (Index low = blockIdx.x * chunk; low < count; low += gridDim.x * chunk) {
        Index end = low + chunk < count ? low + chunk : count;
        Sum<WIRE> sum = {from.pointers, (int)from.terms, low};
        move((WIRE*)out + low, sum, end - low, nothing);
    }
}
