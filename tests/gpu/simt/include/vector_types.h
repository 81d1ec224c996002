/* tests/gpu/simt/include/vector_types.h - CUDA's built-in vector types, with their alignments (CUDA C++
 * Programming Guide, "Built-in Vector Types"). C11 and C++17. */
#ifndef SIMT_VECTOR_TYPES_H
#define SIMT_VECTOR_TYPES_H

#define SIMT_ALIGN(n) __attribute__((aligned(n)))
#define SIMT_VECTORS(t, name, a1, a2, a4)                                                          \
    struct SIMT_ALIGN(a1) name##1 { t x; };                                                        \
    struct SIMT_ALIGN(a2) name##2 { t x, y; };                                                     \
    struct name##3 { t x, y, z; };                                                                 \
    struct SIMT_ALIGN(a4) name##4 { t x, y, z, w; };                                               \
    typedef struct name##1 name##1;                                                                \
    typedef struct name##2 name##2;                                                                \
    typedef struct name##3 name##3;                                                                \
    typedef struct name##4 name##4;

SIMT_VECTORS(signed char, char, 1, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 1, 2, 4)
SIMT_VECTORS(short, short, 2, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 2, 4, 8)
SIMT_VECTORS(int, int, 4, 8, 16)
SIMT_VECTORS(unsigned int, uint, 4, 8, 16)
SIMT_VECTORS(long long, longlong, 8, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 8, 16, 16)
SIMT_VECTORS(float, float, 4, 8, 16)
SIMT_VECTORS(double, double, 8, 16, 16)

#ifdef __cplusplus
struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
#else
typedef struct dim3 { unsigned int x, y, z; } dim3;
#endif

#endif
