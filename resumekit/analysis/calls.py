"""What a call does, judged by its name: training, logging, saving, a random draw, a change."""

from __future__ import annotations

import ast
import re


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Methods whose receiver (and arguments) belong to training, whatever they are called on.
TRAINING_METHODS = _names(
    """
    add_param_group backward clip_grad_norm clip_grad_norm_ clip_grad_value_ load_state_dict
    manual_backward manual_seed requires_grad_ set_epoch step_update unscale_ update_parameters
    zero_grad
    """
)
# Methods that only modules, optimizers and the like have.
OF_TRAINING_OBJECTS = _names(
    """
    clip_gradients eval finetune get_last_lr load_state_dict named_modules named_parameters
    no_sync param_groups parameters prepare requires_grad_ scale set_epoch state_dict step_update
    train unscale_ wait_for_everyone zero_grad
    """
)
OF_LOGGERS = _names(
    """
    add_figure add_histogram add_image add_images add_scalar add_scalars add_text critical debug
    error exception flush info log log_metrics log_metric plot refresh scalar_summary
    set_description set_description_str set_postfix set_postfix_str warning write writelines
    writerow
    """
)
# Constructors of progress bars, loggers and clocks.
LOGGER_MAKERS = re.compile(
    r"(^|\.)(tqdm|trange|SummaryWriter|getLogger|get_logger|open|Progress|perf_counter|time"
    r"|\w*Logger|\w*VideoRecorder|\w*ProgressBar|\w*Timer|\w*Profiler|profile|Event|Lock)$"
)
TRAINING_MAKERS = re.compile(
    r"((^|\.)(nn|optim|lr_scheduler)\.\w+$)|(DataParallel|DDP|GradScaler|Accelerator|Fabric"
    r"|DataLoader|(Random|Distributed|Sequential|Batch)Sampler|Optimizer|\w*[Ss]cheduler|LambdaLR|\w+LR|EMA\w*|\w*Ema(?![a-z])\w*|MovingAverage"
    r"|AveragedModel|create_model|get_model|from_pretrained|build_optimizer"
    r"|create_optimizer|create_optimizer_v2|get_scheduler|create_scheduler|create_scheduler_v2"
    r"|NativeScaler\w*|Adam|AdamW|SGD|RMSprop|Adagrad|prepare|deepspeed\.initialize|\w+Net|\w+Network|\w+Model"
    r"|amp\.initialize|compile)$|(^|\.)(iter|cycle)$"
)
# Constructors of objects that change when they are asked.
REMEMBERING_MAKERS = re.compile(
    r"(^|\.)(Z?Filter|\w*(Running|State|Mean\w*)Filter|\w*(Normali[sz]er|RunningMeanStd\w*|RunningStat"
    r"|Noise|NoiseProcess|Buffer|Memory|Replay\w*|Pool|Queue|(?<!Filter)Bank|Stopp(ing|er)|Stop"
    r"|Patience|Anneal\w*|Curriculum|RandomState|default_rng|Controller|Tracker|Vec_?[Ee]nv\w*|Env)"
    r"|gym\.\w+|make_\w*envs?|\w*EarlyStop\w*)$"
)
# Functions that change their first argument.
_CHANGES_ARGUMENT = re.compile(r"(^|\.)(shuffle|heap(push|pop|pushpop|replace|ify)|insort\w*)$")
_CHANGES_LIST = frozenset({"append", "extend", "insert", "pop", "remove"})
AVERAGE = re.compile(r"EMA|Ema(?![a-z])|MovingAverage")
_WRITES_LOG = re.compile(r"^(log|plot|write|print|show|display|draw|visuali[sz]e)_")
_BUILDERS = re.compile(r"\.(from_\w+|create|build|load)$")
_LOGGING = re.compile(
    r"^(print|pprint|logging|logger|log|wandb|mlflow|plt|writer|tqdm|time|warnings|sys\.stdout"
    r"|sys\.stderr|display|IPython|gc|psutil|os\.makedirs|os\.mkdir|json\.dump|csv|tb|neptune"
    r"|comet_ml|swanlab|torch\.cuda|nvtx|_logger|click)(\.|$)|\.(print|logging)(\.|$)"
)
_SAVING = re.compile(
    r"(^|[._])(save|checkpoint|ckpt|push_to_hub)([._]|$)|^(Save|Checkpoint)|save(Model|Checkpoint)"
    r"|shutil\.(copy|move)|(^|\.)copy(file|2|tree)$"
)
_SAVES_NO_STATE = re.compile(
    r"savefig|save_?im(age|g)|imsave|savez|savetxt|save_sample|save_text|save_result|save_plot"
    r"|save_audio|save_grid|save_log|save_current_visuals|save_anim"
)
_EVALUATION = re.compile(r"(^|[._])(eval|evaluate|evaluation|validate|validation|test)([._]|$)")
_STOPPING = frozenset({"sys.exit", "exit", "quit", "os._exit", "os.kill", "os.abort"})
_RANDOM = re.compile(
    r"^(random\.\w+|np\.random\.\w+|numpy\.random\.\w+|torch\.(rand|randn|randint|randperm"
    r"|normal|bernoulli|multinomial|rand_like|randn_like|randint_like)|F\.dropout"
    r"|(\w+\.)*functional\.dropout)$"
)
_RANDOM_METHODS = _names(
    """
    bernoulli_ multinomial normal_ permutation randint random_ rsample sample shuffle uniform_
    exponential_
    """
)
# Methods that change their object although their result is used.
_CHANGING = re.compile(
    r"^(step|pop\w*|next|next_\w+|update\w*|reset\w*|push\w*|append\w*|add\w*|sample|__next__"
    r"|improved|should_\w+|early_stop\w*|is_better|is_best|check\w*|advance|get_batch|query"
    r"|record\w*|observe|setdefault|select_action|on_\w+|save\w*|increment\w*|fetch\w*|insert|tune\w*|anneal\w*|adapt\w*|collect\w*)$"
)
_LOOKS = re.compile(
    r"^(get|get_(state|config|size|shape|dim|params|length)\w*|is_\w+|has_\w+|can_\w+|size|len|keys|values?|items|copy|encode|decode|map|compute\w*|mean|std|ready"
    r"|full|state_dict|seed|close|render|action_space\w*|observation_space\w*)$"
)
# Methods that change nothing though their result is thrown away.
_NOT_CHANGING = frozenset(
    {"item", "numpy", "cpu", "close", "join", "barrier", "wait", "synchronize", "cuda", "to"}
)
_OVERWRITING = _names(
    """
    bernoulli_ copy_ exponential_ fill_ normal_ random_ set_ uniform_ zero_
    """
)
_TRAINING_CALL = re.compile(
    r"(^|[._])(train|train_\w+|training_step|learn|optimize|fit|accumulate_grad\w*)$"
)
_RESETTING = frozenset({"reset", "clear", "zero_", "reset_meters", "reset_metrics"})
# Names of functions that train, also where nothing else is known of them.
_TRAINING_NAME = re.compile(
    r"(^|[._])(update|train|step|optimi[sz]e|optim|learn|adjust|backward|backprop|clip|anneal|warmup"
    r"|fit|schedul\w*|decay|polyak|soft|accumulate|enqueue|dequeue|lr)(_|$)"
)
_SHOWS = re.compile(
    r"(^|[._])(callback|log|print|plot|show|draw|display|bar|progress|fig|stats?)(_|$)|lineplot"
)
# Functions that only look at a model, an optimizer or a loader.
_QUERY = re.compile(
    r"^(len|isinstance|hasattr|getattr|id|type|str|repr|sum|list|tuple|dict|zip|enumerate|range"
    r"|iter|next|min|max|any|all|sorted|reversed|int|float|bool|tqdm|trange|format|super|vars"
    r"|set|cycle)$"
    r"|(^|[._])(get|count|num|unwrap\w*|deepcopy|copy|summary|tqdm|flops|describe|is|has|watch"
    r"|current|format|cycle|islice|init\w*)([._]|$)"
)


def is_query(call: ast.Call) -> bool:
    """Whether it only looks at its arguments, or wraps them."""
    return bool(_QUERY.search(dotted(call.func)))


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """The values of all arguments, in order."""
    return [*call.args, *(each.value for each in call.keywords)]


def call_of(function: ast.expr) -> ast.Call:
    """A call of a function without arguments."""
    return ast.copy_location(ast.Call(func=function, args=[], keywords=[]), function)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression; calls and subscripts in between are left out."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else node.attr
    if isinstance(node, (ast.Call, ast.Subscript)):
        return dotted(node.func if isinstance(node, ast.Call) else node.value)
    return ""


def maker(call: ast.Call) -> str:
    """The class that a call makes an object of, ``Net`` also for ``Net.from_config()``."""
    return _BUILDERS.sub("", dotted(call.func))


def writes_log(call: ast.Call) -> bool:
    """Whether a method whose result nobody uses writes to a log by its name."""
    return isinstance(call.func, ast.Attribute) and bool(_WRITES_LOG.match(call.func.attr))


def method(call: ast.Call) -> str:
    """The method's or function's own name."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else dotted(func)


def is_logger_method(call: ast.Call) -> bool:
    """Whether only loggers, writers and bars have the method; ``x.log()`` is a logarithm."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in OF_LOGGERS:
        return False
    return call.func.attr != "log" or bool(call.args or call.keywords)


def is_logging(call: ast.Call) -> bool:
    """Whether it prints, logs, plots or measures time."""
    if is_logger_method(call) or method(call) == "print":
        return not dotted(call.func).startswith(("torch.", "math.", "np.", "numpy."))
    return bool(_LOGGING.search(dotted(call.func)))


def is_saving(call: ast.Call) -> bool:
    """Whether it saves a checkpoint, a model or the like."""
    name = dotted(call.func)
    return bool(_SAVING.search(name)) and not _SAVES_NO_STATE.search(name)


def is_evaluation(call: ast.Call) -> bool:
    """Whether its name says that it evaluates."""
    return bool(_EVALUATION.search(dotted(call.func)))


def is_stopping(call: ast.Call) -> bool:
    """Whether it ends the process."""
    return dotted(call.func) in _STOPPING


def draws_random_numbers(call: ast.Call) -> bool:
    """Whether it advances a random generator."""
    name = dotted(call.func)
    if _RANDOM.match(name):
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr in _RANDOM_METHODS


def changes_receiver(call: ast.Call, *, is_statement: bool) -> bool:
    """Whether a method may change its object."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    if is_statement:
        return name not in _NOT_CHANGING and not writes_log(call)
    in_place = name.endswith("_") and not name.startswith("_")
    return in_place or bool(_CHANGING.match(name))


def may_train(call: ast.Call) -> bool:
    """Whether the name of an unknown function says that it changes the training."""
    name = dotted(call.func)
    if not (call.args or call.keywords) or is_query(call) or is_logging(call):
        return False
    return bool(_TRAINING_NAME.search(name)) and not _SHOWS.search(name)


def only_looks(call: ast.Call) -> bool:
    """Whether a method's name says that it reads its object."""
    return bool(_LOOKS.match(method(call)))


def changed_arguments(call: ast.Call) -> list[ast.expr]:
    """The arguments that a library function changes: a list, or a random generator."""
    found = call.args[:1] if _CHANGES_ARGUMENT.search(dotted(call.func)) else []
    return [*found, *(each.value for each in call.keywords if each.arg == "generator")]


def changed_list(call: ast.Call) -> ast.expr | None:
    """The list that a call makes longer, shorter or puts into another order."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _CHANGES_LIST:
        return call.func.value
    found = changed_arguments(call)
    return found[0] if found else None


def trains(call: ast.Call) -> bool:
    """Whether its name says that it trains."""
    return bool(_TRAINING_CALL.search(dotted(call.func)))


def overwrites_receiver(call: ast.Call) -> bool:
    """Whether it gives a tensor a new content, whatever it held: ``x.normal_()``."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in _OVERWRITING


def resets_receiver(call: ast.Call) -> bool:
    """Whether a method gives its object the content that it had when it was made."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in _RESETTING
