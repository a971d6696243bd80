"""Stream the answer to one question, reasoning first. Run: python examples/chat_stream.py MODEL [QUESTION]"""

import sys

from abyssal import LLM, SamplingParams


def main(model: str, question: str = "Why is the sky blue?") -> None:
    messages = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": question},
    ]
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=64, seed=1)
    thought, said = 0, 0
    with LLM(model) as llm:
        for output in llm.stream_chat(messages, params, thinking=True):
            answer = output.outputs[0]
            reasoning = answer.reasoning or ""
            print(reasoning[thought:], end="", flush=True)
            if answer.text and not said:
                print("\n---")
            print(answer.text[said:], end="", flush=True)
            thought, said = len(reasoning), len(answer.text)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
