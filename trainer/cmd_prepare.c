/* trainer/cmd_prepare.c - `stoker prepare`: hands over to the Python package (tokenizers, chat
 * templates), as this process.
 *
 * The package is found at $STOKER_PYTHON (the folder that holds `stoker/`), else in the source tree
 * this binary was built from, else as an installed package. The interpreter is python3 of PATH. */
#include "base/sys.h"
#include "trainer/cmd.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static stk_status set_path(const char *folder, struct stk_error *err)
{
    const char *old = getenv("PYTHONPATH");
    char *path = old && old[0] ? sys_format("%s:%s", folder, old) : sys_strdup(folder);
    int rc = path ? setenv("PYTHONPATH", path, 1) : -1;
    sys_free(path);
    return rc == 0 ? STK_OK
                   : stk_error_set(err, STK_ERR_NOMEM, errno,
                                   "no memory for the environment of `stoker prepare`");
}

int cmd_prepare(int argc, char **argv)
{
    struct stk_error err = { 0 };
    const char *folder = getenv("STOKER_PYTHON");
    if (!folder || !folder[0])
        folder = access(SOURCE_PYTHON "/stoker/__main__.py", R_OK) == 0 ? SOURCE_PYTHON : NULL;
    if (folder && set_path(folder, &err) != STK_OK) return cmd_fail(&err);
    char **args = sys_calloc((size_t)argc + 5, sizeof *args);
    if (!args) {
        stk_error_set(&err, STK_ERR_NOMEM, errno, "no memory to begin");
        return cmd_fail(&err);
    }
    static char python[] = "python3", module[] = "-m", package[] = "stoker", verb[] = "prepare";
    args[0] = python;
    args[1] = module;
    args[2] = package;
    args[3] = verb;
    for (int i = 0; i < argc; i++) args[4 + i] = argv[i];
    execvp(python, args);
    stk_error_set(&err, STK_ERR_IO, errno,
                  "python3 cannot be started (%s): `stoker prepare` is written in Python 3",
                  strerror(errno));
    sys_free(args);
    return cmd_fail(&err);
}
