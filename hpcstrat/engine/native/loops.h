/* Macros for loops over elements, compiled for several instruction sets: the processor's best one
 * is used. The output of a loop must be the memory of an input, or overlap with no input. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&       \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define LOOPS __attribute__((target_clones("default", "avx2", "avx512f"), optimize("O3")))
#else
#define LOOPS
#endif
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for
#else
#define EACH _Pragma("GCC ivdep") for
#endif
