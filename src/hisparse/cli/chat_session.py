"""One `hisparse chat` from options to exit code: load, then turn by turn until the user leaves."""

import io
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from hisparse.cli.conversation import Conversation, conversation_for
from hisparse.cli.interrupts import EXIT_INTERRUPTED, Interrupts
from hisparse.cli.metrics import metrics_for
from hisparse.cli.options import GenerateOptions
from hisparse.cli.progress import on_terminal
from hisparse.cli.rank_watch import RankEnded, RankWatch
from hisparse.cli.render import describe_turn, print_totals, visible
from hisparse.cli.session import EXIT_DONE, check_options, engine_config, load, sampling_params
from hisparse.cli.streams import complain
from hisparse.errors import InputError

if TYPE_CHECKING:
    from hisparse.engine import Engine, EngineMeter, SamplingParams

DEFAULT_CONTEXT = 16384
"""Tokens of a conversation at most, where the model has as many positions."""


PROMPT = "> "
HELP = "/quit or Ctrl-D leaves, /reset forgets the conversation, /stats says where its KV is, Ctrl-C ends an answer"


def run_chat(options: GenerateOptions, context: int | None) -> int:
    """Run the command and return its exit code: 0, 1 when a rank ended or hangs, 130 when the user left with Ctrl-C
    or the process was told to end.

    `options` are those of a run without prompts; a conversation has up to `context` tokens. Raises `InputError` and
    `BackendError` for what keeps it from beginning. Later mistakes are one line each, and the conversation goes on.
    """
    check_options(options)
    if context is not None and context <= options.sampling.max_tokens:
        raise InputError(
            f"a conversation of {context} tokens (--context) leaves no room for a question beside an answer of "
            f"{options.sampling.max_tokens} (--max-tokens)"
        )
    with metrics_for(options.output.metrics_port) as meter:
        return _run(options, context, meter)


def _run(options: GenerateOptions, context: int | None, meter: "EngineMeter | None") -> int:
    from hisparse.engine import Engine
    from hisparse.engine.tp import ProcessExecutor

    params = sampling_params(options.sampling)
    loaded = load(options)
    if context is None:
        context = max(min(DEFAULT_CONTEXT, loaded.max_tokens), params.max_tokens + 1)
    conversation = conversation_for(loaded.tokenizer)
    params = replace(params, stop=(*params.stop, *conversation.stop))
    longest_prompt = context - params.max_tokens
    config = engine_config(options, loaded.geometry_for(options.device.kv_dtype), [longest_prompt])
    with Engine(loaded, config, meter=meter) as engine:
        pids = engine.executor.pids if isinstance(engine.executor, ProcessExecutor) else ()
        with Interrupts() as interrupts, RankWatch(pids) as ranks:
            return Chat(engine, conversation, params, interrupts, ranks).run()


class Chat:
    """A conversation at a terminal, or one read from a pipe, line by line, with one engine for all its turns."""

    def __init__(
        self,
        engine: "Engine",
        conversation: Conversation,
        params: "SamplingParams",
        interrupts: Interrupts,
        ranks: RankWatch,
    ) -> None:
        self._engine = engine
        self._conversation = conversation
        self._params = params
        self._interrupts = interrupts
        self._ranks = ranks
        self._is_watched = on_terminal() and sys.stdin.isatty()
        self._console = Console(highlight=False, markup=False, emoji=False)

    def run(self) -> int:
        """Read and answer until the input ends, or the user leaves. Returns the exit code.

        Raises `RankError` when a rank ended or hangs, and what else keeps the engine from going on.
        """
        self._prepare_input()
        while not self._interrupts.leaves:
            try:
                line = self._read()
            except KeyboardInterrupt:
                print()
                if not self._interrupts.leaves:
                    print("Ctrl-C again leaves")
                continue
            except RankEnded:
                if self._is_watched:
                    print()
                self._engine.stats()  # raises: ranks that are asked tell which it was
                raise
            if line is None or line.strip() == "/quit":
                return EXIT_DONE
            self._interrupts.num = 0
            if line.startswith("/"):
                self._command(line.strip())
            elif line.strip():
                self._answer(line)
        return EXIT_INTERRUPTED

    def _prepare_input(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if self._is_watched:
            with suppress(ImportError):
                import readline  # noqa: F401 (loading it lets a line be edited)
            loaded, limit = self._engine.loaded, self._engine.config.max_tokens
            print(f"{loaded.name}, conversations of up to {limit} tokens. {HELP}")

    def _read(self) -> str | None:
        """The next line without its end; None when there are no more. Raises `KeyboardInterrupt`, `RankEnded`."""
        try:
            with self._interrupts.raising(), self._ranks.raising():
                return input(PROMPT if self._is_watched else "")
        except EOFError:
            if self._is_watched:
                print()
            return None
        except OSError as error:
            raise InputError(f"standard input cannot be read: {error.strerror}") from error

    def _command(self, command: str) -> None:
        if command == "/reset":
            self._conversation.clear()
            print("the conversation is forgotten; its KV stays where it is until the room is needed")
        elif command == "/stats":
            print_totals(self._console, self._engine.stats())
        else:
            _complain(f"there is no command {visible(command)}: {HELP}; with a space before it, it is sent as text")

    def _answer(self, text: str) -> None:
        try:
            prompt_ids, request_id = self._ask(text)
        except InputError as error:
            _complain(str(error))
            return
        try:
            for step in self._engine.run():
                print(visible("".join(token.text for token in step.tokens)), end="", flush=True)
                if self._interrupts.num:
                    self._engine.abort(request_id)
        finally:
            print()
        result = self._engine.take_result(request_id)
        if result.output_ids:
            self._conversation.keep(text, prompt_ids, result.output_ids, result.text)
        print(describe_turn(result))

    def _ask(self, text: str) -> tuple[list[int], str]:
        """The prompt and its request. Raises `InputError` for what cannot be asked; the engine is then as before."""
        prompt_ids = self._conversation.ask(text)
        limit = self._engine.config.max_tokens
        room = limit - len(prompt_ids)
        if room < 1:
            raise InputError(
                f"the conversation would have {len(prompt_ids)} tokens, and {limit} is the limit with room for an "
                "answer: ask less, forget it with /reset, or start with a larger --context"
            )
        params = replace(self._params, max_tokens=min(self._params.max_tokens, room))
        return prompt_ids, self._engine.add_request(prompt_ids, params)


def _complain(message: str) -> None:
    # After what was said before it, on a terminal and in a file.
    sys.stdout.flush()
    complain(message)
