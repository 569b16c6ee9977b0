"""Write data_config.json, once every shard of hidden states is there and agrees."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.extraction.manifest import write_manifest
    from eyas.shards import shards_of

    shards = shards_of(args.rows, args.shard_rows)
    write_manifest([args.output.parent / f"{shard.name}.safetensors" for shard in shards], args.rows, args.output)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows in a shard")
    parser.add_argument("--output", type=Path, required=True, help="the manifest; its shards lie beside it")
    run_job(parser, work)
