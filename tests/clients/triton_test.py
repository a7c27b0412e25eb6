#!/usr/bin/env python3
"""NVIDIA's tritonclient for Python, over gRPC, unmodified: what a server and its model say of themselves, an answer whole and in
pieces, errors, and how often the model was asked. Runs in a folder of its own (tools/clients.sh), since it pins protobuf."""
import os
import pathlib
import queue
import sys

own = pathlib.Path(os.environ["KVASIR_CLIENTS"]) / "tritonclient" / "bin" / "python"
if pathlib.Path(sys.executable) != own:
    if not own.exists():
        print("skipped: tritonclient is not installed (tools/clients.sh)")
        sys.exit(77)
    os.execv(own, [str(own), __file__])

import numpy as np
import tritonclient.grpc as triton

PROMPT = "The capital of France is"
GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}


def text(name, value):
    one = triton.InferInput(name, [1], "BYTES")
    one.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return one


def flag(name, value):
    one = triton.InferInput(name, [1], "BOOL")
    one.set_data_from_numpy(np.array([value]))
    return one


def streamed(client, model, prompts):
    """What comes for each request, by its id, up to the one marked as the last."""
    came = queue.Queue()
    client.start_stream(lambda result, error: came.put((result, error)))
    for name, prompt in prompts.items():
        client.async_stream_infer(model, [text("text_input", prompt), flag("stream", True)], request_id=name, parameters=GREEDY,
                                  enable_empty_final_response=True)
    pieces, open_ = {name: [] for name in prompts}, set(prompts)
    while open_:
        result, error = came.get(timeout=120)
        assert error is None, error
        said = result.get_response()
        pieces[said.id].append(result.as_numpy("text_output")[0].decode())
        if said.parameters["triton_final_response"].bool_param:
            open_.remove(said.id)
    client.stop_stream()
    return pieces


def main():
    client = triton.InferenceServerClient(os.environ["KVASIR_GRPC"])
    assert client.is_server_live() and client.is_server_ready()
    about = client.get_server_metadata()
    assert about.name and about.version, about
    model = os.environ["KVASIR_NAME"]
    assert client.is_model_ready(model)
    metadata = client.get_model_metadata(model)
    assert {i.name for i in metadata.inputs} >= {"text_input", "stream"} and {o.name for o in metadata.outputs} >= {"text_output"}, metadata
    assert client.get_model_config(model).config.model_transaction_policy.decoupled

    def asked():
        return client.get_inference_statistics(model).model_stats[0].inference_stats.success.count

    before = asked()
    whole = client.infer(model, [text("text_input", PROMPT), flag("exclude_input_in_output", True)],
                         outputs=[triton.InferRequestedOutput("text_output")], parameters=GREEDY).as_numpy("text_output")[0].decode()
    assert whole and not whole.startswith(PROMPT), whole
    pieces = streamed(client, model, {"a": PROMPT, "b": PROMPT})
    assert len(pieces["a"]) > 2 and "".join(pieces["a"]) == "".join(pieces["b"]) == whole, (pieces, whole)
    assert asked() >= before + 3, (before, asked())
    for call, words in ((lambda: client.infer("nobody", [text("text_input", PROMPT)]), "nobody"),
                        (lambda: client.infer(model, [text("text_input", PROMPT)], parameters={"temperature": -1}), "temperature")):
        try:
            call()
        except triton.InferenceServerException as e:
            assert words in e.message(), e.message()
        else:
            raise AssertionError(f"{words} was taken")
    print(f"tritonclient: whole and streamed are {whole!r}; errors name what is wrong")


main()
