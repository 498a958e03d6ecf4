"""Draw one step of the looped pipeline: which stage works on which micro-batch when, as text and as an image.

python tools/draw_pipeline.py --layout 2+5x4+2 --hidden-size 1024 --stages 2 --micro-batches 8 --image step.png

Without --placement the best one is searched. Depths are dealt equally from 1 to R, unless given. Times are FLOPs.
"""

from __future__ import annotations

import argparse

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.errors import UserError, exit_on_user_error
from megatron_rgpt.pipeline.costs import flops_costs
from megatron_rgpt.pipeline.placement import check_stages, parse_placement
from megatron_rgpt.pipeline.placement_search import predict_fill, search_placement
from megatron_rgpt.pipeline.render import save_timeline, timeline
from megatron_rgpt.pipeline.schedule import THOROUGH_EFFORT, Limits, plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="2+5x4+2", help="prelude+core x R+coda")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--recompute", action="store_true", help="recompute each visit in its backward pass")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--placement", help="such as core=3,5,6,6 coda=2,0,0,0 (default: searched)")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--depths", type=int, nargs="+", help="of each micro-batch, instead of --micro-batches")
    parser.add_argument("--in-flight", type=int, help="most micro-batches in flight (default: twice the stages)")
    parser.add_argument("--forward-only", action="store_true", help="as in evaluation")
    parser.add_argument("--exits", type=int, nargs="+", default=[], help="depths at which the state also leaves")
    parser.add_argument("--width", type=int, default=120, help="columns of the text")
    parser.add_argument("--image", help="file to write the image to")
    args = parser.parse_args()
    with exit_on_user_error():
        config = ModelConfig(
            layout=Layout.parse(args.layout),
            hidden_size=args.hidden_size,
            num_attention_heads=1,
            seq_length=args.seq_length,
        )
        check_stages(config.layout, args.stages)
        recurrences = config.layout.recurrences
        depths = args.depths or [1 + index % recurrences for index in range(args.micro_batches)]
        if not depths or min(depths) < 0:
            raise UserError("--micro-batches and --depths: a step needs a micro-batch, and depths of 0 or more")
        costs = flops_costs(config, args.vocab_size, recompute=args.recompute)
        limits = Limits(args.in_flight)
        placement = (
            search_placement(config, args.vocab_size, args.stages, costs, depths, in_flight=args.in_flight)
            if args.placement is None
            else parse_placement(args.placement, config.layout, args.stages)
        )
        step = plan(
            placement,
            depths,
            costs,
            limits,
            forward_only=args.forward_only,
            exits=args.exits,
            effort=THOROUGH_EFFORT,
        )
        print(timeline(step, args.width))
        if not args.forward_only and (warning := predict_fill(placement, depths, costs, limits).warning()):
            print(warning)
        if args.image:
            save_timeline(step, args.image)


if __name__ == "__main__":
    main()
