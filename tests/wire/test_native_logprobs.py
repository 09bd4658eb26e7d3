"""Scoring given tokens: by the engine where it is exact, else by the trainer; one answer and one bill per key."""

import threading

import httpx
import pytest

from gateway.core.scripted import BASE_FINGERPRINT, scripted_logprob
from gateway.wire.native.schemas.sampling import LogprobsRead
from tests.wire.gateways import Gateway
from tests.wire.training import BASE, datum, new_session, run, trained_session, usage_of

PROMPT = [97, 98, 99]


def score(client: httpx.Client, path: str, **body: object) -> dict[str, object]:
    response = client.post(path, json={"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    LogprobsRead.model_validate_json(response.content)
    return response.json()


@pytest.fixture(scope="module")
def unembedded(gateway: Gateway) -> str:
    """A session whose published version has a trained unembedding."""
    with gateway.client() as client:
        return trained_session(client, lora={"rank": 8, "train_unembed": True})


def test_targets_are_scored_position_by_position(client: httpx.Client) -> None:
    answer = score(client, "/logprobs", base_model=BASE, targets=[1, 2, 3])

    expected = [scripted_logprob(BASE_FINGERPRINT, *pair) for pair in zip(PROMPT, [1, 2, 3], strict=True)]
    assert answer["logprobs"] == pytest.approx(expected, rel=1e-6)
    assert answer["alternative_logprobs"] is None
    assert str(answer["id"]).startswith("scr-")
    assert (answer["version"], answer["fingerprint"]) == (None, f"base-{BASE}")
    assert answer["usage"] == {"prefill": 3, "cached_prefill": 0, "sample": 0}
    assert answer["cost_nanos"] == 3 * 100


def test_alternatives_come_back_as_rows_over_the_temperature(client: httpx.Client, published: str) -> None:
    rows = [[1, 2], [3, 4], [5, 6]]
    warm = score(client, f"/sessions/{published}/logprobs", alternatives=rows)
    cold = score(client, f"/sessions/{published}/logprobs", alternatives=rows, temperature=0.5)

    assert warm["logprobs"] is None
    halves = [[value / 0.5 for value in row] for row in warm["alternative_logprobs"]]  # type: ignore[attr-defined]
    assert cold["alternative_logprobs"] == [pytest.approx(row, rel=1e-6) for row in halves]
    version = client.get(f"/model_packages/{published}/1").json()
    assert (warm["version_id"], warm["fingerprint"]) == (version["id"], version["fingerprint"])


def test_trainer_and_engine_score_a_prompt_alike(client: httpx.Client, published: str) -> None:
    prompt = score(client, f"/sessions/{published}/logprobs")
    shifted = score(client, "/logprobs", version=f"{published}@1", prompt=PROMPT[:-1], targets=PROMPT[1:])

    assert prompt["logprobs"][1:] == pytest.approx(shifted["logprobs"], rel=1e-6)  # type: ignore[index]
    assert (str(prompt["id"])[:3], str(shifted["id"])[:3]) == ("smp", "scr")


def test_a_version_with_a_trained_unembedding_is_scored_by_the_trainer(client: httpx.Client, unembedded: str) -> None:
    answer = score(client, f"/sessions/{unembedded}/logprobs")
    again = score(client, "/logprobs", version=f"{unembedded}@1", temperature=2.0)
    alone = score(client, f"/sessions/{unembedded}/logprobs", prompt=[97])

    assert str(answer["id"]).startswith("scr-")
    first, *rest = answer["logprobs"]  # type: ignore[misc]
    assert first is None
    assert again["logprobs"] == [None, *(pytest.approx(value / 2, rel=1e-6) for value in rest)]
    assert answer["usage"] == {"prefill": 2, "cached_prefill": 0, "sample": 0}
    assert alone["logprobs"] == [None]


def test_the_bill_names_the_session_that_was_asked(client: httpx.Client) -> None:
    session = trained_session(client)
    assert usage_of(client, session) == {"train": 4}

    score(client, f"/sessions/{session}/logprobs", targets=[1, 2, 3])
    score(client, "/logprobs", version=f"{session}@1", targets=[1, 2, 3])

    assert usage_of(client, session) == {"train": 4, "prefill": 3}


def test_a_key_is_answered_and_paid_once_also_when_latest_has_moved_on(client: httpx.Client) -> None:
    session = trained_session(client)
    path, body = f"/sessions/{session}/logprobs", {"prompt": PROMPT, "targets": [1, 2, 3]}
    headers = {"Idempotency-Key": f"score-{session}"}
    answers: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.post(path, json=body, headers=headers).content))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    run(client, session, "forward_backward", data=[datum()])
    run(client, session, "optim_step")
    run(client, session, "save_weights")

    assert client.post(path, json=body, headers=headers).content == answers[0]
    assert usage_of(client, session)["prefill"] == 3
    for other in ({"prompt": PROMPT}, {"prompt": PROMPT, "targets": [1, 2, 4]}):
        reused = client.post(path, json=other, headers=headers)
        assert (reused.status_code, reused.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert client.post(path, json=body).json()["version"] == f"{session}@2"


def test_scores_of_a_stranger_and_of_unpublished_weights_are_refused(
    client: httpx.Client, gateway: Gateway, published: str
) -> None:
    body = {"prompt": PROMPT, "targets": PROMPT}
    with gateway.client(gateway.keys.stranger) as stranger:
        for path, more in ((f"/sessions/{published}/logprobs", {}), ("/logprobs", {"version": f"{published}@1"})):
            response = stranger.post(path, json={**body, **more})
            assert response.status_code == 404, response.text
    fresh = new_session(client)["id"]
    state = run(client, fresh, "save_state")["result"]["version"]
    for version, code in ((None, "no_published_version"), (state, "version_not_published")):
        response = client.post(
            f"/sessions/{fresh}/logprobs", json={**body, **({"version": version} if version else {})}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (409, code)


OUTSIDE, LENGTH, INVALID = "token_out_of_vocabulary", "length_mismatch", "invalid_request"
BAD: list[tuple[str, dict[str, object], str, str]] = [
    ("nothing", {"prompt": [], "targets": []}, INVALID, "prompt"),
    ("long", {"prompt": [1] * 513, "targets": [1] * 513}, "context_length_exceeded", "prompt"),
    ("long and warm", {"prompt": [1] * 514, "temperature": 0.5}, "context_length_exceeded", "prompt"),
    ("prompt outside", {"prompt": [1, 256], "targets": [1, 1]}, OUTSIDE, "prompt[1]"),
    ("warm prompt outside", {"prompt": [1, 2, 256], "temperature": 0.5}, OUTSIDE, "prompt[2]"),
    ("too few targets", {"prompt": [1, 2], "targets": [1]}, LENGTH, "targets"),
    ("target outside", {"prompt": [1, 2], "targets": [1, -1]}, OUTSIDE, "targets[1]"),
    ("huge target", {"prompt": [1], "targets": [2**63]}, OUTSIDE, "targets[0]"),
    ("target is true", {"prompt": [1], "targets": [True]}, INVALID, "targets[0]"),
    ("targets are rows", {"prompt": [1], "targets": [[1]]}, INVALID, "targets[0]"),
    ("too few rows", {"prompt": [1, 2], "alternatives": [[1]]}, LENGTH, "alternatives"),
    ("no alternatives", {"prompt": [1], "alternatives": [[]]}, LENGTH, "alternatives[0]"),
    ("many alternatives", {"prompt": [1], "alternatives": [[1] * 65]}, LENGTH, "alternatives[0]"),
    ("ragged", {"prompt": [1, 2], "alternatives": [[1, 2], [3]]}, LENGTH, "alternatives[1]"),
    ("alternative outside", {"prompt": [1, 2], "alternatives": [[1, 2], [3, 256]]}, OUTSIDE, "alternatives[1][1]"),
    ("flat", {"prompt": [1], "alternatives": [1]}, INVALID, "alternatives[0]"),
    ("both", {"prompt": [1], "targets": [1], "alternatives": [[1]]}, INVALID, "alternatives"),
    ("cold", {"prompt": [1], "targets": [1], "temperature": 0}, INVALID, "temperature"),
    ("hot", {"prompt": [1], "temperature": 100.5}, INVALID, "temperature"),
    ("unknown field", {"prompt": [1], "targets": [1], "top_k": 2}, INVALID, "top_k"),
]


@pytest.mark.parametrize(("body", "code", "field"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_request_is_refused_and_says_where(
    client: httpx.Client, body: dict[str, object], code: str, field: str
) -> None:
    response = client.post("/logprobs", json={"base_model": BASE, **body})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["field"]) == (400, code, field), error


def test_an_unknown_version_or_base_model_is_not_found(client: httpx.Client) -> None:
    for target, code in (({"version": "nothing@1"}, "unknown_version"), ({"base_model": "x"}, "unknown_base_model")):
        response = client.post("/logprobs", json={"prompt": PROMPT, "targets": PROMPT, **target})
        assert (response.status_code, response.json()["error"]["code"]) == (404, code)
