// What CUDA's compiler knows by itself, for g++: a grid runs as loops.
#include <cmath>
#include <csetjmp>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define __HPCSTRAT_STANDIN__ 1

struct uint3 { unsigned int x, y, z; };
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int a = 1, unsigned int b = 1, unsigned int c = 1)
      : x(a), y(b), z(c) {}
};
static thread_local uint3 threadIdx, blockIdx;
static thread_local dim3 blockDim, gridDim;
static const int warpSize = 32;

struct __attribute__((aligned(8))) float2 { float x, y; };
struct __attribute__((aligned(16))) float4 { float x, y, z, w; };
struct __attribute__((aligned(16))) double2 { double x, y; };
struct __attribute__((aligned(8))) int2 { int x, y; };
struct __attribute__((aligned(16))) int4 { int x, y, z, w; };
struct __attribute__((aligned(8))) uint2 { unsigned int x, y; };
struct __attribute__((aligned(16))) uint4 { unsigned int x, y, z, w; };
struct __attribute__((aligned(16))) longlong2 { long long x, y; };
struct __attribute__((aligned(16))) ulonglong2 { unsigned long long x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From> static inline To _standin_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
static inline unsigned int __float_as_uint(float x) { return _standin_bits<unsigned int>(x); }
static inline int __float_as_int(float x) { return _standin_bits<int>(x); }
static inline float __uint_as_float(unsigned int x) { return _standin_bits<float>(x); }
static inline float __int_as_float(int x) { return _standin_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return _standin_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return _standin_bits<double>(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline float __double2float_rn(double a) { return (float)a; }
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline float __ll2float_rn(long long a) { return (float)a; }
static inline int __float2int_rn(float a) { return (int)rintf(a); }
static inline int __float2int_rz(float a) { return (int)a; }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)(((unsigned long long)a * b) >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
#define _STANDIN_MINMAX(T) \
  static inline T min(T a, T b) { return b < a ? b : a; } \
  static inline T max(T a, T b) { return a < b ? b : a; }
_STANDIN_MINMAX(int)
_STANDIN_MINMAX(unsigned int)
_STANDIN_MINMAX(long)
_STANDIN_MINMAX(unsigned long)
_STANDIN_MINMAX(long long)
_STANDIN_MINMAX(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
using std::isfinite;
using std::isinf;
using std::isnan;

static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __threadfence(); }
static inline void __threadfence_system() { __threadfence(); }
template <class T> static inline T __ldg(const T* p) { return *p; }

template <class T, class F> static inline T _standin_change(T* at, F change) {
  T old, now;
  __atomic_load(at, &old, __ATOMIC_SEQ_CST);
  do {
    now = change(old);
  } while (!__atomic_compare_exchange(at, &old, &now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}
#define _STANDIN_ATOMIC(NAME, EXPRESSION) \
  template <class T> static inline T NAME(T* at, typename std::decay<T>::type value) { \
    return _standin_change(at, [value](T old) -> T { return EXPRESSION; }); \
  }
_STANDIN_ATOMIC(atomicAdd, old + value)
_STANDIN_ATOMIC(atomicSub, old - value)
_STANDIN_ATOMIC(atomicMax, old < value ? value : old)
_STANDIN_ATOMIC(atomicMin, value < old ? value : old)
_STANDIN_ATOMIC(atomicExch, ((void)old, value))
_STANDIN_ATOMIC(atomicAnd, old & value)
_STANDIN_ATOMIC(atomicOr, old | value)
_STANDIN_ATOMIC(atomicXor, old ^ value)
template <class T> static inline T atomicCAS(T* at, T expected, T value) {
  __atomic_compare_exchange(at, &expected, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

// What -fsanitize=alignment calls in the place of a device's fault, which ends the kernel.
static thread_local std::jmp_buf _standin_fault;
extern "C" void __ubsan_handle_type_mismatch_v1_abort(void*, void*) {
  std::longjmp(_standin_fault, 1);
}

// Calling a kernel with the addresses of its arguments, as cuLaunchKernel does.
template <class... A, std::size_t... I>
static void _standin_call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<typename std::remove_cv<typename std::remove_reference<A>::type>::type*>(args[I])...);
}
template <class... A>
static int _standin_run(void (*kernel)(A...), const unsigned* grid, const unsigned* block, void** args) {
  gridDim = dim3(grid[0], grid[1], grid[2]);
  blockDim = dim3(block[0], block[1], block[2]);
  // cudaErrorMisalignedAddress
  if (setjmp(_standin_fault)) return 716;
  for (unsigned bz = 0; bz < grid[2]; ++bz)
    for (unsigned by = 0; by < grid[1]; ++by)
      for (unsigned bx = 0; bx < grid[0]; ++bx)
        for (unsigned tz = 0; tz < block[2]; ++tz)
          for (unsigned ty = 0; ty < block[1]; ++ty)
            for (unsigned tx = 0; tx < block[0]; ++tx) {
              blockIdx = {bx, by, bz};
              threadIdx = {tx, ty, tz};
              _standin_call(kernel, args, std::index_sequence_for<A...>{});
            }
  return 0;
}
template <class... A> static int _standin_sizes(void (*)(A...), int* sizes) {
  int all[] = {0, (int)sizeof(A)...};
  for (std::size_t i = 0; i < sizeof...(A); ++i) sizes[i] = all[i + 1];
  return (int)sizeof...(A);
}
#define _STANDIN_KERNEL(NAME, ...) \
  extern "C" int _standin_launch_##NAME(const unsigned* grid, const unsigned* block, void** args) { \
    return _standin_run(&__VA_ARGS__, grid, block, args); \
  } \
  extern "C" int _standin_sizes_##NAME(int* sizes) { return _standin_sizes(&__VA_ARGS__, sizes); }
