/* trainer/source.c - opens a model folder. Must not know: the engine, what the tensors are for. */
#include "trainer/source.h"
#include "base/sys.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

stk_status source_open(struct source *s, const char *folder, bool tensors, struct stk_error *err)
{
    *s = (struct source){ .folder = folder };
    struct stat st;
    if (stat(folder, &st) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "--model %s: %s", folder, strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return stk_error_set(err, STK_ERR_FORMAT, 0,
                             "--model %s: not a folder; a Hugging Face model folder was expected",
                             folder);
    char *path = sys_format("%s/config.json", folder);
    if (!path) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    stk_status status = model_config_read(path, &s->cfg, err);
    sys_free(path);
    s->have_cfg = status == STK_OK;
    if (status == STK_OK && tensors) status = st_set_open(folder, &s->set, err);
    if (status == STK_OK && tensors)
        status = model_check_tensors(&s->cfg, s->set, &s->head_only, err);
    if (status == STK_OK && tensors && s->cfg.tied)
        s->both = st_set_find(s->set, NAME_EMBED) && st_set_find(s->set, NAME_HEAD);
    if (status != STK_OK) source_close(s);
    return status;
}

void source_close(struct source *s)
{
    if (s->set) st_set_close(s->set);
    if (s->have_cfg) model_config_free(&s->cfg);
    *s = (struct source){ .folder = s->folder };
}

const struct st_tensor *source_find(const struct source *s, const char *name)
{
    if (s->head_only && strcmp(name, NAME_EMBED) == 0) name = NAME_HEAD;
    return st_set_find(s->set, name);
}
