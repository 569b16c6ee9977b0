"""Make a transformers model folder (bfloat16 safetensors) from a GGUF file."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    import torch
    from eyas.target.gguf import convert_gguf

    torch.set_num_threads(args.threads)
    convert_gguf(args.gguf, args.output)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--gguf", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--output", type=Path, required=True, help="the model folder")
    run_job(parser, work)
