/* engine/machine.h - a machine's figures for the prediction: from a file, measured, or simulated.
 * Clients see stk_machine_* of engine/stoker.h. Application's thread. */
#ifndef ENGINE_MACHINE_H
#define ENGINE_MACHINE_H

#include "engine/engine.h"

/* The figures of a machine as the sim device wants them. */
struct dev_model machine_model(const stk_machine *m);
/* What e simulates (device sim): its device's and its disk's figures. False: it simulates none. */
bool machine_simulated(const stk_engine *e, stk_machine *out);
/* Drives that stk_seal measured, one for each drive (folders may share one), appended to none.
 * drive_of_path[i]: which. False: there are folders, and not all were measured. */
bool machine_drives(const stk_engine *e, stk_machine *m, uint8_t drive_of_path[STK_NVME_MAX]);

/* What the run paces copies by; all 0 where nothing is known of the machine, or the device computes on the
 * host: its copies are what moves there. */
void machine_pace(const stk_engine *e, struct pace *out);

/* Any plan over e's layout on `asked` (NULL: as stk_predict), with what is known of visits:
 * predict_api.c. After place_choose. For a planner that compares. */
stk_status predict_plan(stk_engine *e, const stk_machine *asked, const struct plan *plan,
                        const struct plan_input *input, bool norm_fails, stk_prediction *out);

#endif
