# shows: LLM.chat with every engine option as a flag, and a template from a file
# argv: --chat-template-path template.jinja --enforce-eager --trust-remote-code
from pathlib import Path

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}<assistant>"
Path("template.jinja").write_text(TEMPLATE)

parser = FlexibleArgumentParser(description="chat")
EngineArgs.add_cli_args(parser)
parser.set_defaults(model="Qwen/Qwen2.5-0.5B-Instruct")
parser.add_argument("--chat-template-path", type=str)
args = vars(parser.parse_args())
path = args.pop("chat_template_path")

llm = LLM(**args)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 6
conversation = [{"role": "system", "content": "the fox"}, {"role": "user", "content": "hello"}]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=Path(path).read_text())
print(outputs[0].outputs[0].text)
assert outputs[0].prompt.startswith("<system> the fox")

outputs = llm.chat([conversation] * 4, sampling_params, use_tqdm=True)
assert len(outputs) == 4
