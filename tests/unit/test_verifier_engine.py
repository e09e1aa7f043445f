"""The engine on real tiny models: what a request gets, whatever runs beside it."""

from common.loading.tokenizer import Tokenizer
from verifier_svc.request import FinishReason


def test_golden(make_rig, tiny_models):
    model, folder = tiny_models()
    rig = make_rig(model, Tokenizer(folder))
    [request] = rig.run([rig.ask("a", [1, 2, 3], temperature=0.0, max_tokens=20)])
    print(request.token_ids, rig.text(request), rig.finished(request))
    assert request.finish_reason is FinishReason.MAX_TOKENS
