// Numbers of single precision, with those below the normal range.
//
// CuPy compiles with -ftz=true, behind all options of ours (cupy/cupy issue 9576): then
// each operation on floats takes such numbers for zero. Instructions of PTX do what they
// say: "subnormal numbers are supported" without .ftz (PTX ISA, section "add").

#ifdef __CUDACC_RTC__
#define SINGLE_PAIR(name, symbol, instruction)                                          \
    __device__ inline float name(float one, float other) {                       \
        float result;                                                                   \
        asm(instruction " %0, %1, %2;" : "=f"(result) : "f"(one), "f"(other));          \
        return result;                                                                  \
    }
#define SINGLE_OF(name, Out, In, plain, instruction, out, in)                           \
    __device__ inline Out name(In value) {                                       \
        Out result;                                                                     \
        asm(instruction " %0, %1;" : "=" out(result) : in(value));                      \
        return result;                                                                  \
    }
#else
#define SINGLE_PAIR(name, symbol, instruction)                                          \
    inline float name(float one, float other) { return one symbol other; }
#define SINGLE_OF(name, Out, In, plain, instruction, out, in)                           \
    inline Out name(In value) { return plain(value); }
#endif

SINGLE_PAIR(single_sum, +, "add.rn.f32")
SINGLE_PAIR(single_difference, -, "sub.rn.f32")
SINGLE_PAIR(single_product, *, "mul.rn.f32")
SINGLE_PAIR(single_quotient, /, "div.rn.f32")
SINGLE_OF(single_root, float, float, sqrtf, "sqrt.rn.f32", "f", "f")
SINGLE_OF(single_from, float, double, (float), "cvt.rn.f32.f64", "f", "d")
SINGLE_OF(double_from, double, float, (double), "cvt.f64.f32", "d", "f")

struct Float {
    float value;

    Float() = default;
    template <class T> __device__ Float(T number) : value((float)number) {}
    __device__ Float(double number) : value(single_from(number)) {}
    __device__ explicit operator double() const { return double_from(value); }
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

__device__ inline bool operator==(Float one, Float other) {
    return one.value == other.value;
}
