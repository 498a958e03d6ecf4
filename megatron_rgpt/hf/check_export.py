"""Load a Hugging Face folder as a stranger would, and compare its logits with those it must have.

Run as a script of its own, isolated from this project: python -I check_export.py FOLDER REFERENCE RESULT. REFERENCE
is a safetensors file with `tokens` [B, S], `exits` [K] and `logits` [K, B, S, V], and `text.N` and `ids.N` of texts to
tokenize. RESULT is written as one JSON object.
"""

import json
import sys


def main() -> None:
    import torch
    import transformers
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, reference = sys.argv[1], load_file(sys.argv[2])
    model, loading = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    lacking = {kind: sorted(loading[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    # stored weights are compared as they are, not the arithmetic of their precision
    model = model.float().eval()
    recurrent = model.config.model_type == "recurrent_gpt"
    if recurrent:
        # the reference is without noise, whatever the run's evaluation had
        model.config.eval_noise = False
    differences = []
    for exit_, logits in zip(reference["exits"].tolist(), reference["logits"]):  # noqa: B905
        depth = {"num_recurrences": exit_} if recurrent else {}
        with torch.no_grad():
            theirs = model(reference["tokens"], use_cache=False, **depth).logits
        differences.append(((theirs - logits).abs().max() / logits.abs().max()).item())
    texts = {name[5:]: bytes(text).decode() for name, text in reference.items() if name.startswith("text.")}
    tokenizer_fault = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True) if texts else None
        for number, text in texts.items():
            if tokenizer.encode(text, add_special_tokens=False) != reference[f"ids.{number}"].tolist():
                tokenizer_fault = f"other ids for {text!r}"
    except Exception as error:
        tokenizer_fault = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    result = {
        "differences": differences,
        "tokenizer_fault": tokenizer_fault,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "transformers": transformers.__version__,
        "ours_loaded": "megatron_rgpt" in sys.modules,
        **{kind: names for kind, names in lacking.items() if names},
    }
    with open(sys.argv[3], "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
