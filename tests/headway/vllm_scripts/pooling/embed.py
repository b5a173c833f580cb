# shows: embeddings with runner=pooling and command-line options
from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="Qwen/Qwen2.5-0.5B-Instruct", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace):
    llm = LLM(**vars(args))
    outputs = llm.embed(["the quick", "the lazy dog"])
    for output in outputs:
        print(output.outputs.embedding[:4], len(output.outputs.embedding))
    assert len({len(output.outputs.embedding) for output in outputs}) == 1


if __name__ == "__main__":
    main(parse_args())
