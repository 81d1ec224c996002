#!/usr/bin/env python3
"""The division of cores against its neighbours: one thread fewer and one more, of compute and of the update.

    python3 bench/cores.py --stoker build/stoker [--update chase,serial] [--of update,compute] [--steps 3] [--rounds 1] [--runs FILE] [--json FILE]
        [-- options of bench step]

Each run is `stoker bench step` (llama-207m, 2 x 512 tokens unless told otherwise), which measures its limit, the step's products by the library alone, in
turn with the steps. In a round the division that the machine gets by default is run before and after each neighbour, and that pair's own
ratio is taken: a neighbour's step over the geometric mean of the two around it, as they are and (where compute has as many threads, which the limit
has, too) each divided by the limit of its own run.
--runs FILE keeps runs as lines of JSON and takes those that are there along: a round at a time, when the machine is quiet. Prints, and writes with --json,
for each mode and neighbour: medians over the pairs, the smallest and the largest, and `noise`: the same of the default against itself.
"""
import argparse, json, math, os, statistics, subprocess, sys, tempfile


def neighbours(cores, of):
    near = [(cores, cores - 1), (cores, cores + 1)] if "update" in of else []
    near += [(cores - 1, cores), (cores + 1, cores)] if "compute" in of else []
    return [n for n in near if min(n) > 0]


def run(args, mode, compute, update):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [args.stoker, "bench", "step", "--steps", str(args.steps), "--update", mode, "--threads", str(compute), "--update-threads",
                   str(update), "--json", out.name] + args.more
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit("stoker failed: " + done.stderr.strip())
        rows = {row["what"]: row for row in json.load(open(out.name))}
    step = rows["step"]
    return {"mode": mode, "compute": compute, "update": update, "step_s": step["seconds"], "share": step["share"],
            "waits_update_s": rows["waits for the update"]["seconds"]}


def a_round(args, mode, keep):
    base = (args.cores, args.cores)
    number = max([r["round"] for r in keep], default=-1) + 1
    order = [base]
    for near in neighbours(args.cores, args.of.split(",")):
        order += [near, base]
    for compute, update in order:
        keep.append(dict(run(args, mode, compute, update), round=number))
        if args.runs:
            with open(args.runs, "a") as f:
                f.write(json.dumps(keep[-1]) + "\n")


def ratios(runs, value):
    """{neighbour: [value over that of the default around it]}; `noise`: the second default around over the first."""
    out = {}
    for number in sorted({r["round"] for r in runs}):
        at = [r for r in runs if r["round"] == number]
        for before, near, after in zip(at[0::2], at[1::2], at[2::2]):
            if not all(value(r) for r in (before, near, after)):
                continue
            name = "%d compute, %d update" % (near["compute"], near["update"])
            out.setdefault(name, []).append(value(near) / math.sqrt(value(before) * value(after)))
            out.setdefault("noise", []).append(value(after) / value(before))
    return out


def summary(v):
    return {"median": round(statistics.median(v), 3), "least": round(min(v), 3), "most": round(max(v), 3), "pairs": len(v)}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stoker", default="build/stoker")
    p.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="what the default is here; `stoker train` says it (cores:)")
    p.add_argument("--update", default="chase,serial")
    p.add_argument("--of", default="update,compute", help="whose neighbours")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--runs")
    p.add_argument("--json")
    p.add_argument("more", nargs="*")
    args = p.parse_args()
    table = []
    known = [json.loads(line) for line in open(args.runs)] if args.runs and os.path.exists(args.runs) else []
    for mode in args.update.split(","):
        runs = [r for r in known if r["mode"] == mode]
        for _ in range(args.rounds):
            a_round(args, mode, runs)
        time, limit = ratios(runs, lambda r: r["step_s"]), ratios(runs, lambda r: 1 / r["share"] if r.get("share") else None)
        limit = {k: v for k, v in limit.items() if k == "noise" or k.startswith("%d compute" % args.cores)}
        base = [r for r in runs if (r["compute"], r["update"]) == (args.cores, args.cores)]
        if not base:
            continue
        table.append({"mode": mode, "cores": args.cores, "step_s": statistics.median(r["step_s"] for r in base),
                      "share_of_limit": statistics.median(r["share"] for r in base if r.get("share")),
                      "against": {k: dict({"step": summary(time[k])}, **({"step_by_limit": summary(limit[k])} if k in limit else {}))
                                  for k in time}})
        print("%s: %d compute, %d update: %.3f s a step, %.2f of the matrix limit" % (mode, args.cores, args.cores, table[-1]["step_s"],
                                                                                 table[-1]["share_of_limit"]))
        for name, of in table[-1]["against"].items():
            own = ", each by its own limit x %.3f" % of["step_by_limit"]["median"] if "step_by_limit" in of else ""
            print("  %-24s step x %.3f (%.3f to %.3f, %d pairs)%s" % (
                name, of["step"]["median"], of["step"]["least"], of["step"]["most"], of["step"]["pairs"], own))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(table, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
