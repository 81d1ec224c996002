/* gpu/cuda/cuda_lt.c - where cuBLASLt's functions come from: the shared library, opened when a
 * device is.
 *
 * Owns the library's handle. Must not know what the functions are used for. Application's thread.
 * The tests' stand-in leaves this file out and brings a cuda_lt_table of its own. The library is
 * found as any other (LD_LIBRARY_PATH, /etc/ld.so.conf), else where NVIDIA's installer puts it. */
#include "gpu/cuda/cuda_impl.h"

#include <dlfcn.h>
#include <string.h>

#define LT_TEXT(x) #x
#define LT_NAME(major) "libcublasLt.so." LT_TEXT(major)

static void *lt_load(void)
{
    void *library = dlopen(LT_NAME(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    return library
               ? library
               : dlopen("/usr/local/cuda/lib64/" LT_NAME(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
}

/* memcpy: ISO C has no conversion from an object's pointer to a function's. */
static bool lt_find(void *library, const char *name, void *out)
{
    void *symbol = dlsym(library, name);
    memcpy(out, &symbol, sizeof symbol);
    return symbol != NULL;
}

stk_status cuda_lt_table(struct cuda_lt *out, struct stk_error *err)
{
    const char *missing = NULL;
    *out = (struct cuda_lt){ .library = lt_load() };
    if (!out->library) {
        const char *why = dlerror();
        return stk_error_set(
            err, STK_ERR_UNSUPPORTED, 0,
            "device cuda: %s cannot be loaded (%s): install CUDA %d's libraries, or "
            "set LD_LIBRARY_PATH to the folder that has it",
            LT_NAME(CUBLAS_VER_MAJOR), why ? why : "no reason given", CUBLAS_VER_MAJOR);
    }
#define LT_FIND(name) \
    if (!lt_find(out->library, #name, &out->name)) missing = #name;
    CUDA_LT_MAP(LT_FIND)
#undef LT_FIND
    if (!missing) return STK_OK;
    cuda_lt_free(out);
    return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                         "device cuda: %s has no function %s: it is not the library of CUDA %d",
                         LT_NAME(CUBLAS_VER_MAJOR), missing, CUBLAS_VER_MAJOR);
}

void cuda_lt_free(struct cuda_lt *lt)
{
    if (lt->library) dlclose(lt->library);
    *lt = (struct cuda_lt){ 0 };
}
