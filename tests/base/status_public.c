/* tests/base/status_public.c - the codes as the installed header has them, for test_sys.c: the
 * two headers define the same enum, so that one file can hold only one of them at a time. */
#include "engine/stoker.h"

int status_public_value(const char *name);

#include <string.h>

#define PUBLIC(name) \
    if (strcmp(code, #name) == 0) return name
int status_public_value(const char *code)
{
    PUBLIC(STK_OK);
    PUBLIC(STK_ERR_NOMEM);
    PUBLIC(STK_ERR_IO);
    PUBLIC(STK_ERR_CORRUPT);
    PUBLIC(STK_ERR_DEVICE);
    PUBLIC(STK_ERR_CONFIG);
    PUBLIC(STK_ERR_STATE);
    PUBLIC(STK_ERR_FORMAT);
    PUBLIC(STK_ERR_NOSPACE);
    PUBLIC(STK_ERR_UNSUPPORTED);
    PUBLIC(STK_ERR_STALLED);
    PUBLIC(STK_ERR_NONFINITE);
    PUBLIC(STK_ERR_INTERRUPTED);
    PUBLIC(STK_BUSY);
    PUBLIC(STK_END);
    return 12345;
}
