# shows: audio input
# refused: models read text alone
from vllm.assets.audio import AudioAsset

audio = AudioAsset("mary_had_lamb").audio_and_sample_rate
