/* tests/gpu/standin/include/library_types.h - element types of CUDA's libraries, with the values of NVIDIA's
 * public documentation; those that we use. */
#ifndef LIBRARY_TYPES_H
#define LIBRARY_TYPES_H

typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16F = 2,
    CUDA_R_8I = 3,
    CUDA_R_32I = 10,
    CUDA_R_16BF = 14
} cudaDataType;
typedef cudaDataType cudaDataType_t;

#endif
