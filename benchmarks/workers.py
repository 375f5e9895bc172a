"""Two workers on two cores against one on one core, one thread each: same shards, model and global batch. For
comparison, two trainings that share nothing but the machine, which show what it has to give.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from benchmarks.processes import on_cores
from benchmarks.results import ratio, say
from benchmarks.work import A, our_step_times, pairs_parser, scratch, steady

LEAST = 1.6


def main() -> None:
    p = pairs_parser(__doc__, cores=2)
    p.add_argument("--precision", default="auto", help="as in the trainer")
    args = p.parse_args()
    usteps = A.grad_accum_usteps
    if args.cores < 1 or usteps % args.cores:
        p.error(f"--cores {args.cores} does not divide the {usteps} micro-steps of a step; give 1, 2 or 4")
    halves = A.but(grad_accum_usteps=usteps // args.cores)
    rates, most = [], []
    for _ in range(args.pairs):
        with scratch(A, shards=2) as (directory, data, model):
            given = {"steps": args.steps, "precision": args.precision}
            with on_cores(args.cores, threads=1):
                several = our_step_times(halves, data, model, directory / "n", workers=args.cores, **given)
            with on_cores(args.cores, threads=1), ThreadPoolExecutor(args.cores) as pool:
                outs = [directory / f"apart-{number}" for number in range(args.cores)]
                under_way = [pool.submit(our_step_times, A, data, model, out, **given) for out in outs]
                apart = [run.result() for run in under_way]
            with on_cores(1):
                one = our_step_times(A, data, model, directory / "1", **given)
        alone = A.sequences_per_step / steady(one)
        rates.append((A.sequences_per_step / steady(several), alone))
        most.append((sum(A.sequences_per_step / steady(times) for times in apart), alone))
    what = f"{args.cores} workers on {args.cores} cores, work A, {args.precision}"
    least = LEAST if args.cores == 2 else None
    say(ratio(what, rates, ours=f"{args.cores} workers", beside="one on one core", at_least=least))
    say(ratio(f"the same, {args.cores} trainings apart", most, ours="together", beside="one on one core"))


if __name__ == "__main__":
    main()
