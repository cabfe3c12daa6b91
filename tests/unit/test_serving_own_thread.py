"""Work beside the engine leaves no thread, and so no pool of threads, behind."""

import threading

import pytest

from serving.engine import loading
from serving.engine.loading import load_served_model
from serving.engine.own_thread import in_own_thread
from tests.serving_checkpoint import save_run


def test_call_runs_in_a_thread_that_has_ended_and_what_it_raises_is_raised() -> None:
    thread = in_own_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0)


def test_model_is_loaded_in_a_thread_that_has_ended(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    load_model = loading.load_model

    def noting(*args: object, **options: object) -> object:
        threads.append(threading.current_thread())
        return load_model(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "load_model", noting)
    load_served_model(save_run(tmp_path_factory.mktemp("runs") / "tiny"))
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
