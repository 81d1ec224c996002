/* gpu/cuda/cuda_dnn_table.c - where cuDNN's functions come from: the shared library, opened when a
 * device is.
 *
 * Owns the library's handle. Must not know what the functions are used for. Application's thread.
 * The tests' stand-in brings a dnn_table_open of its own. The library is found as any other
 * (LD_LIBRARY_PATH, /etc/ld.so.conf), else where NVIDIA's installer puts it. */
#include "gpu/cuda/cuda_dnn.h"

#include <dlfcn.h>

#define DNN_TEXT(x) #x
#define DNN_NAME(major) "libcudnn.so." DNN_TEXT(major)

static void *dnn_load(void)
{
    static const char *const where[] = { DNN_NAME(CUDNN_MAJOR),
                                         "/usr/local/cuda/lib64/" DNN_NAME(CUDNN_MAJOR),
                                         "/usr/local/cuda/lib/" DNN_NAME(CUDNN_MAJOR) };
    void *library = NULL;
    /* NODELETE: it loads parts of its own that stay, and registers kernels with the runtime. */
    for (size_t i = 0; i < sizeof where / sizeof where[0] && !library; i++)
        library = dlopen(where[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    return library;
}

/* memcpy: ISO C has no conversion from an object's pointer to a function's. */
static bool dnn_find(void *library, const char *name, void *out)
{
    void *symbol = dlsym(library, name);
    memcpy(out, &symbol, sizeof symbol);
    return symbol != NULL;
}

stk_status dnn_table_open(struct dnn_table *out, struct stk_error *err)
{
    const char *missing = NULL;
    *out = (struct dnn_table){ .library = dnn_load() };
    if (!out->library)
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0, "%s cannot be loaded",
                             DNN_NAME(CUDNN_MAJOR));
#define DNN_FIND(name) \
    if (!dnn_find(out->library, #name, &out->name)) missing = #name;
    DNN_MAP(DNN_FIND)
#undef DNN_FIND
    if (missing) {
        dnn_table_close(out);
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0, "%s has no %s", DNN_NAME(CUDNN_MAJOR),
                             missing);
    }
    const size_t version = out->cudnnGetVersion();
    if (version >= DNN_VERSION_LEAST) return STK_OK;
    dnn_table_close(out);
    return stk_error_set(err, STK_ERR_UNSUPPORTED, 0, "version %zu is older than %d", version,
                         DNN_VERSION_LEAST);
}

void dnn_table_close(struct dnn_table *t)
{
    if (t->library) dlclose(t->library);
    *t = (struct dnn_table){ 0 };
}
