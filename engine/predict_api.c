/* engine/predict_api.c - stk_predict: the engine's plan, a machine's figures and what is known of
 * visits, brought together for predict_run. Application's thread, after stk_seal. */
#include "engine/machine.h"
#include "engine/predict.h"
#include "base/sys.h"

#include <string.h>

stk_status stk_place_cost(stk_engine *e, uint32_t place, const stk_visit_cost *cost)
{
    stk_error_clear(&e->err);
    if (place >= e->n_places)
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "stk_place_cost: place %u; stk_order described %u", place,
                             e->n_places);
    if (!e->costs) e->costs = sys_calloc(e->n_places, sizeof *e->costs);
    if (!e->costs)
        return stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for the costs of visits");
    e->costs[place] = *cost;
    return STK_OK;
}

static bool given(const stk_visit_cost *c)
{
    return c->forward_ns > 0 || c->backward_ns > 0 || c->recompute_ns > 0;
}

/* Trials are of this machine; where it is predicted for another one, they say nothing. */
static bool fill_costs(const stk_engine *e, struct predict_cost *out)
{
    bool all = true;
    for (uint32_t i = 0; i < e->n_places; i++) {
        stk_visit_cost c = { 0 };
        bool known = !e->cfg.machine && trial_cost(e, i, false, &c);
        stk_visit_cost again = { 0 };
        if (known) trial_cost(e, i, true, &again);
        if (!known && e->costs && given(&e->costs[i])) {
            c = e->costs[i];
            again = c;
            known = true;
        }
        out[i] = (struct predict_cost){ known,          c.forward_ns,     c.backward_ns,
                                        c.recompute_ns, again.forward_ns, again.backward_ns };
        all &= known;
    }
    return all;
}

/* A smooth weighted round-robin over the folders, as the store deals extents (nvme/store_place.c). */
struct dealer { uint32_t n; double weight[STK_NVME_MAX], credit[STK_NVME_MAX]; };

static uint32_t deal_one(struct dealer *d, uint64_t bytes)
{
    uint32_t best = 0;
    for (uint32_t k = 0; k < d->n; k++) {
        d->credit[k] += (double)bytes * d->weight[k];
        if (d->credit[k] > d->credit[best]) best = k;
    }
    d->credit[best] -= (double)bytes;
    return best;
}

/* Those of each state in order, then activations. */
static void deal(const stk_engine *e, const struct plan_input *in, const uint8_t *drive_of_path,
                 uint8_t *out)
{
    struct dealer d = { .n = e->n_paths };
    double sum = 0;
    stk_drive info;
    for (uint32_t i = 0; i < d.n; i++)
        sum += d.weight[i] = stk_drive_info(e, i, &info) ? info.weight : 1;
    for (uint32_t i = 0; i < d.n; i++) d.weight[i] = sum > 0 ? d.weight[i] / sum : 0;
    for (uint32_t s = 0; s < CHUNK_STATE_N; s++) {
        memset(d.credit, 0, sizeof d.credit);
        for (uint32_t c = 0; c < in->n_chunks; c++) {
            const struct plan_chunk_in *p = &in->chunks[c];
            if (p->home[s] == CHUNK_NVME && p->bytes[s] > 0)
                out[c * CHUNK_STATE_N + s] = drive_of_path[deal_one(&d, p->bytes[s])];
        }
    }
    memset(d.credit, 0, sizeof d.credit);
    for (uint32_t a = 0; a < plan_act_count(in); a++) {
        uint64_t bytes = plan_act_bytes(in, a);
        if (bytes) out[in->n_chunks * CHUNK_STATE_N + a] = drive_of_path[deal_one(&d, bytes)];
    }
}

/* The machine asked for, or the one that is simulated, with drives. */
static stk_status find_machine(stk_engine *e, const stk_machine *asked, stk_machine *m,
                               uint8_t drive_of_path[STK_NVME_MAX])
{
    stk_machine_init(m, sizeof *m);
    for (uint32_t i = 0; i < STK_NVME_MAX; i++) drive_of_path[i] = (uint8_t)i;
    if (!asked) asked = e->cfg.machine;
    if (asked) memcpy(m, asked, asked->size < sizeof *m ? asked->size : sizeof *m);
    else if (!machine_simulated(e, m))
        return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                             "stk_predict: no machine is given, and none is simulated");
    if (m->n_drives > 0 || e->n_paths == 0 || e->place.nvme_bytes == 0) return STK_OK;
    if (machine_drives(e, m, drive_of_path)) return STK_OK;
    return stk_error_set(&e->err, STK_ERR_CONFIG, 0,
                         "the drives were not measured (--measure-drives 1 does it)");
}

static void fill_bytes(const stk_engine *e, stk_prediction *out)
{
    out->host_bytes = e->place.host_bytes;
    out->device_bytes = e->place.device_bytes;
    out->nvme_bytes = e->place.nvme_bytes;
    out->nvme_read_bytes = plan_moved(e->plan_train, PLAN_NVME_READ);
    out->nvme_write_bytes = plan_moved(e->plan_train, PLAN_NVME_WRITE);
    out->copy_in_bytes = plan_moved(e->plan_train, PLAN_COPY_IN_LINK);
    out->copy_out_bytes = plan_moved(e->plan_train, PLAN_COPY_OUT_LINK);
}

stk_status predict_plan(stk_engine *e, const stk_machine *asked, const struct plan *plan,
                        const struct plan_input *input, bool norm_fails, stk_prediction *out)
{
    stk_machine m;
    uint8_t drive_of_path[STK_NVME_MAX];
    STK_TRY(find_machine(e, asked, &m, drive_of_path));
    struct predict_cost *cost = sys_calloc(e->n_places, sizeof *cost);
    uint8_t *drives = sys_calloc((size_t)e->layout->n_chunks * CHUNK_STATE_N + plan_act_count(input) + 1, 1);
    stk_status st = STK_OK;
    if (!cost || !drives)
        st = stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory to predict a step");
    if (st == STK_OK) {
        bool known = fill_costs(e, cost), simulated = !asked && !e->cfg.machine && e->caps.modelled_time;
        if (e->n_paths > 1) deal(e, input, drive_of_path, drives);
        struct predict_in in = { .plan = plan,
                                 .input = input,
                                 .machine = &m,
                                 .cost = cost,
                                 .parts = PLAN_RUN_UPDATE | PLAN_RUN_VISITS,
                                 .norm_fails = norm_fails,
                                 .overwrite_grads = e->cfg.overwrite_grads,
                                 .compute_threads = m.on_host ? e->caps.compute_threads : 0,
                                 .update_threads = simulated ? e->cores.update : m.on_host ? e->cfg.update_threads : 0,
                                 .drive_bytes = drives_depth_bytes(e),
                                 .drive_of = drives };
        st = predict_run(&in, NULL, NULL, out, &e->err);
        out->costs_known = known;
    }
    sys_free(cost);
    sys_free(drives);
    return st;
}

stk_status stk_predict(stk_engine *e, const stk_machine *asked, stk_prediction *out)
{
    stk_error_clear(&e->err);
    enum eng_state s = eng_state(e);
    if ((s != ENG_READY && s != ENG_DRY) || !e->plan_train || e->cfg.own_order)
        return eng_refuse_state(e, "stk_predict",
                                "after stk_seal, between steps, of a model that trains in the "
                                "engine's order");
    stk_prediction p = { .size = sizeof p };
    stk_prediction bound = { .size = sizeof bound };
    STK_TRY(predict_plan(e, asked, e->plan_train, &e->pin, false, &p));
    bool binds = e->pin.update == PLAN_SPECULATE && e->cfg.clip > 0;
    if (binds) STK_TRY(predict_plan(e, asked, e->plan_train, &e->pin, true, &bound));
    else bound = p;
    p.bound.step_s = bound.step_s;
    p.bound.compute_s = bound.compute_s;
    memcpy(&p.bound.exposed_s, &bound.exposed_s, sizeof p.bound.exposed_s);
    fill_bytes(e, &p);
    size_t size = out->size;
    memcpy(out, &p, size < sizeof p ? size : sizeof p);
    out->size = size;
    return STK_OK;
}
