"""Complete a few prompts in one batch. Run: python examples/generate.py MODEL

`abyssal make-checkpoint --preset micro DIR` writes a small random MODEL to try it with.
"""

import sys

from abyssal import LLM, SamplingParams


def main(model: str) -> None:
    prompts = ["The deep sea is", "def quicksort(items):", "注意力"]
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1)
    with LLM(model) as llm:
        for output in llm.generate(prompts, params):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main(sys.argv[1])
