# shows: LLM.generate with every engine option as a flag
# argv: --model facebook/opt-125m --max-tokens 8 --temperature 0.5 --max_model_len 128
from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="Qwen/Qwen2.5-0.5B-Instruct")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    return parser


def main(args):
    wanted = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in wanted.items():
        if value is not None:
            setattr(params, name, value)
    outputs = llm.generate(["the quick", "the lazy"], params)
    for output in outputs:
        print(output.prompt, output.outputs[0].text)
        assert len(output.outputs[0].token_ids) <= 8
    assert llm.llm_engine.model_config.max_model_len == 128


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
