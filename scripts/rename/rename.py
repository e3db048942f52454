"""Rename identifiers and modules by reviewed tables.

    rename.py list ROOT                      identifiers with a banned word, their kinds, uses, strings
    rename.py functions ROOT WORD... [--under DIR]   what locals of these names hold, by function
    rename.py check ROOT                     collisions and stale entries of the tables; changes nothing
    rename.py renames ROOT                   lines of docs/renames.tsv that the tables stand for (before apply)
    rename.py apply ROOT [--no-format]       apply paths.tsv, table.tsv, locals.tsv; then ruff format

Tables, tab-separated, # begins a comment:
    paths.tsv    old path <TAB> new path                       repository-relative; git mv + imports
    table.tsv    old <TAB> new [<TAB> file glob[,glob] [<TAB> attr]]   identifiers: every NAME token (definition,
                 use, attribute, keyword argument), strings of getattr & co, ``old`` in docstrings. With globs
                 (fnmatch on the repository-relative path; !glob excludes) only in those files. `attr`: only
                 attributes, methods, fields and keyword arguments, no variables. `def`: the glob is the one file that
                 defines the function or class; it, and the names that are imported from it, are renamed.
    strings.tsv  file glob <TAB> old <TAB> new                 string constants that are names
    locals.tsv   file <TAB> qualified name of the function <TAB> old <TAB> new
                 the variable or parameter `old` of that function (comprehensions and closures with it).
                 A file that moved is found by its function: unique (basename, qualified name, old), else
                 (qualified name, old). Keyword arguments of a renamed parameter follow where the callee's
                 last name is the function's (its class's for __init__).
Needs Python 3.12 or later (f-strings are tokens).
"""

import argparse
import ast
import builtins
import collections
import fnmatch
import keyword
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
from words import BANNED  # noqa: E402

SHOW = 5
CODE = ("megatron_epp", "tests", "scripts", "examples", "docs", "setup.py", "conftest.py")
ATTR_CALLS = {"getattr", "hasattr", "setattr", "delattr", "object", "attrgetter", "methodcaller", "patch", "setitem", "multiple", "Mock"}
BIN = str(pathlib.Path(sys.executable).parent)


def words_of(name):
    return [p.lower() for x in name.split("_") for p in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", x)]


def rows(path):
    path = HERE / path
    if not path.exists():
        return []
    return [
        [c.strip() for c in line.split("\t")]
        for line in path.read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]


def python_files(root, package_only=False):
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=root, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in sorted(set(out)):
        if name and (root / name).exists() and (not package_only or name.startswith("megatron_epp/")):
            yield name


# ------------------------------------------------------------------ scopes


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(tree):
    """(qualified name, node) of every function; lambdas belong to the function around them."""
    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTION):
                yield f"{prefix}{child.name}", child
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)
    yield from walk(tree, "")


def arguments(node):
    a = node.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]


def bound(function):
    """Names that a function binds itself: parameters and assignments outside of nested functions and
    classes; those of lambdas and comprehensions count as the function's."""
    names, free = set(), set()
    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTION + (ast.ClassDef,)):
                names.add(child.name)
                for d in child.decorator_list: walk(d)
                continue
            if isinstance(child, ast.Lambda):
                names.update(a.arg for a in arguments(child))
            if isinstance(child, ast.Name) and isinstance(child.ctx, (ast.Store, ast.Del)):
                names.add(child.id)
            if isinstance(child, (ast.Nonlocal, ast.Global)):
                free.update(child.names)
            if isinstance(child, ast.ExceptHandler) and child.name: names.add(child.name)
            if isinstance(child, (ast.MatchAs, ast.MatchStar)) and child.name: names.add(child.name)
            if isinstance(child, ast.alias): names.add((child.asname or child.name).split(".")[0])
            walk(child)
    names.update(a.arg for a in arguments(function))
    for statement in function.body:
        walk(ast.Module([statement], []))
    return names - free


def occurrences(function, name):
    """Nodes (Name, arg, handlers) of the variable `name` of `function`, closures included."""
    found = []
    def walk(node, top=False):
        if isinstance(node, FUNCTION) and not top:
            if node.name == name: found.append(node)
            for d in node.decorator_list + node.args.defaults + [x for x in node.args.kw_defaults if x] + ([node.returns] if node.returns else []) + [a.annotation for a in arguments(node) if a.annotation]:
                walk(d)
            if name in bound(node):
                return
            for s in node.body: walk(s)
            return
        if isinstance(node, ast.Name) and node.id == name: found.append(node)
        if isinstance(node, ast.arg) and node.arg == name: found.append(node)
        if isinstance(node, ast.ExceptHandler) and node.name == name: found.append(node)
        if isinstance(node, (ast.Nonlocal, ast.Global)) and name in node.names: found.append(node)
        for child in ast.iter_child_nodes(node): walk(child)
    for a in arguments(function):
        if a.arg == name: found.append(a)
    for s in function.body: walk(s)
    return found


# ------------------------------------------------------------------ edits


class Source:
    def __init__(self, path):
        self.path, self.text = path, path.read_text()
        self.lines = self.text.encode().split(b"\n")
        self.tree = ast.parse(self.text)
        self.edits = {}

    def put(self, line, column, old, new):
        raw = self.lines[line - 1]
        if raw[column : column + len(old.encode())] != old.encode():
            return False
        self.edits.setdefault((line, column), (old, new))
        return True

    def rename_node(self, node, old, new):
        if isinstance(node, FUNCTION):
            start = re.search(rb"def\s+", self.lines[node.lineno - 1]).end()
            self.put(node.lineno, start, old, new)
        elif isinstance(node, (ast.ExceptHandler, ast.Nonlocal, ast.Global)):
            for m in re.finditer(rb"\b" + old.encode() + rb"\b", self.lines[node.lineno - 1]):
                self.put(node.lineno, m.start(), old, new)
        elif not self.put(node.lineno, node.col_offset, old, new):
            print(f"WARN {self.path}:{node.lineno}: {old} is not where the tree says")

    def write(self):
        for (line, column), (old, new) in sorted(self.edits.items(), reverse=True):
            raw = self.lines[line - 1]
            self.lines[line - 1] = raw[:column] + new.encode() + raw[column + len(old.encode()) :]
        if self.edits:
            self.path.write_text(b"\n".join(self.lines).decode())
        return len(self.edits)


def tokens(text):
    import io, tokenize
    return tokenize.generate_tokens(io.StringIO(text).readline)


def docstring_nodes(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef) + FUNCTION) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                yield node, first.value


def in_docstring(source, doc, names):
    """``old`` and `old` in backquotes, and the first column of a table of fields."""
    if not names: return
    pattern = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    for number in range(doc.lineno, doc.end_lineno + 1):
        raw = source.lines[number - 1]
        text = raw.decode()
        for regex in (rf"(?<=``)({pattern})(?=(\(\))?``)", rf"(?<=``)({pattern})(?=[.\[(,=])", rf"^\s*()({pattern})(?=   +\S)", rf"(?<=[`.])({pattern})(?=`)"):
            for m in re.finditer(regex, text):
                old = m.group(2) if regex.startswith("^") else m.group(1)
                start = m.start(2) if regex.startswith("^") else m.start(1)
                source.put(number, len(text[:start].encode()), old, names[old])


# ------------------------------------------------------------------ list


def external():
    """Identifiers of what the package is built on: never rename an attribute or keyword of these."""
    cache = HERE / "external.txt"
    if not cache.exists():
        names = set()
        site = pathlib.Path(BIN).parent / "lib/python3.12/site-packages"
        folders = [site / n for n in ("megatron", "numpy", "torch/nn", "torch/distributed", "torch/utils", "torch/autograd", "torch/cuda", "torch/optim", "pytest", "_pytest", "psutil")]
        files = [p for f in folders for p in f.rglob("*.py")] + list((site / "torch").glob("*.py"))
        import sysconfig
        std = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files += [std / n for n in ("argparse.py", "dataclasses.py", "functools.py", "subprocess.py", "pathlib.py", "enum.py", "typing.py", "unittest/mock.py", "threading.py", "socket.py", "re/__init__.py", "json/__init__.py", "logging/__init__.py", "collections/__init__.py", "contextlib.py", "statistics.py", "tempfile.py", "shutil.py", "multiprocessing/process.py", "multiprocessing/connection.py", "multiprocessing/context.py")]
        for p in files:
            try: tree = ast.parse(p.read_text(errors="replace"))
            except (SyntaxError, OSError): continue
            for n in ast.walk(tree):
                if isinstance(n, ast.Attribute): names.add(n.attr)
                elif isinstance(n, ast.keyword) and n.arg: names.add(n.arg)
                elif isinstance(n, ast.arg): names.add(n.arg)
                elif isinstance(n, FUNCTION + (ast.ClassDef,)): names.add(n.name)
        cache.write_text("\n".join(sorted(names)))
    return set(cache.read_text().split())


def census(root):
    kinds = collections.defaultdict(lambda: collections.defaultdict(set))
    uses, strings = collections.Counter(), collections.Counter()
    for name in python_files(root, True):
        tree = ast.parse((root / name).read_text())
        for part in pathlib.PurePath(name).with_suffix("").parts[1:]:
            kinds["module"][part].add(name)
        def visit(node, scope):
            for c in ast.iter_child_nodes(node):
                if isinstance(c, ast.ClassDef):
                    kinds["class"][c.name].add(name); visit(c, "class")
                elif isinstance(c, FUNCTION):
                    kinds[{"class": "method", "module": "function"}.get(scope, "inner")][c.name].add(name)
                    for a in arguments(c): kinds["param"][a.arg].add(name)
                    visit(c, "function")
                else:
                    if isinstance(c, ast.Name):
                        uses[c.id] += 1
                        if isinstance(c.ctx, ast.Store):
                            kinds[{"module": "constant", "class": "field"}.get(scope, "local")][c.id].add(name)
                    elif isinstance(c, ast.Attribute):
                        uses[c.attr] += 1
                        if isinstance(c.ctx, ast.Store): kinds["attr"][c.attr].add(name)
                    elif isinstance(c, ast.keyword) and c.arg: uses[c.arg] += 1
                    elif isinstance(c, ast.Constant) and isinstance(c.value, str): strings[c.value] += 1
                    visit(c, scope)
        visit(tree, "module")
    return kinds, uses, strings


def do_list(root, everything):
    kinds, uses, strings = census(root)
    outside = external()
    by_name = collections.defaultdict(list)
    for kind, names in kinds.items():
        for n in names: by_name[n].append(f"{kind}:{len(names[n])}")
    print("name\tkinds\tuses\tstring\texternal\tword -> field's")
    for n in sorted(by_name):
        bad = [w for w in words_of(n) if w in BANNED]
        if bad and (everything or any(not k.startswith("local") for k in by_name[n])):
            print(n, " ".join(by_name[n]), uses[n], f"string:{strings[n]}" if strings[n] else "", "EXTERNAL" if n in outside else "", "; ".join(f"{w} -> {BANNED[w] or '?'}" for w in bad), sep="\t")


def do_functions(root, wanted, under):
    """A compact view of every function that binds one of `wanted`."""
    for name in python_files(root, True):
        if under and not any(name.startswith(f"megatron_epp/{u}") for u in under): continue
        text = (root / name).read_text(); lines = text.split("\n"); tree = ast.parse(text)
        shown = False
        for qualified, node in functions(tree):
            for old in sorted(bound(node) & wanted):
                nodes = occurrences(node, old)
                if not nodes: continue
                if not shown: print(f"=== {name}"); shown = True
                params = {a.arg for a in arguments(node)}
                returns = ast.unparse(node.returns) if node.returns else ""
                numbers = sorted({n.lineno for n in nodes})[:SHOW]
                annotation = next((ast.unparse(a.annotation) for a in arguments(node) if a.arg == old and a.annotation), "")
                print(f"{qualified} -> {returns}  [{old}{' PARAM ' + annotation if old in params else ''}]")
                for k in numbers: print(f"    {lines[k-1].strip()[:110]}")


# ------------------------------------------------------------------ apply


def moved(paths):
    return {old: new for old, new, *_ in paths}


def module_of(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def locate(root, files, trees, entry):
    """The file that has the function of a locals entry, or None."""
    file, qualified, old = entry[:3]
    def has(f):
        return any(q == qualified and old in bound(n) for q, n in trees(f))
    if file in files and has(file): return file, qualified
    same = [f for f in files if f.startswith("megatron_epp/") and pathlib.PurePath(f).name == pathlib.PurePath(file).name and f != file and has(f)]
    if len(same) == 1: return same[0], qualified
    any_ = [f for f in files if f.startswith("megatron_epp/") and has(f)] if not same else []
    if len(any_) == 1: return any_[0], qualified
    # moved and its class renamed: the only function of that name that has the variable
    leaf = qualified.split(".")[-1]
    if not same and not any_ and leaf != "__init__":
        alike = {(f, q) for f in files if f.startswith("megatron_epp/") for q, n in trees(f) if q.split(".")[-1] == leaf and old in bound(n)}
        if len(alike) == 1: return alike.pop()
    return None, qualified


def in_globs(file, text):
    globs = [g for g in text.split(",") if g]
    if any(fnmatch.fnmatch(file, g[1:]) for g in globs if g[0] == "!"): return False
    positive = [g for g in globs if g[0] != "!"]
    return not positive or any(fnmatch.fnmatch(file, g) for g in positive)


def global_map(file, table, attr, source=None):
    made = {row[0]: row[1] for row in table if (row[3] if len(row) > 3 else "") == ("attr" if attr else "") and in_globs(file, row[2] if len(row) > 2 else "")}
    if attr: return made
    for old, new, defining, *kind in table_defs(table):
        module = module_of(defining)
        if file == defining or source is not None and any(
            isinstance(n, ast.ImportFrom) and n.module == module and any(a.name == old and a.asname is None for a in n.names) for n in ast.walk(source.tree)
        ):
            made[old] = new
    return made


def table_defs(table):
    return [row for row in table if len(row) > 3 and row[3] == "def"]


def field_positions(tree):
    """(line, column) of names of methods' definitions, fields and keyword arguments."""
    spots = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.ClassDef):
            for s in n.body:
                if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name): spots.add((s.target.lineno, s.target.col_offset))
                if isinstance(s, ast.Assign): spots.update((t.lineno, t.col_offset) for t in s.targets if isinstance(t, ast.Name))
                if isinstance(s, FUNCTION): spots.add((s.lineno, s.col_offset + (10 if isinstance(s, ast.AsyncFunctionDef) else 4)))
        if isinstance(n, ast.keyword) and n.arg: spots.add((n.lineno, n.col_offset))
    return spots


def check_scopes(file, tree, names):
    """New names that a scope has already."""
    problems = []
    new_of = names
    def scope(label, ids):
        for old, new in new_of.items():
            if old in ids and new in ids and not (new in new_of and new_of[new] != new):
                problems.append(f"{file}: {label}: {old} -> {new}: there is a {new} already")
    scope("module", {t.id for s in tree.body for t in ast.walk(s) if isinstance(s, (ast.Assign, ast.AnnAssign)) and isinstance(t, ast.Name)} | {s.name for s in tree.body if hasattr(s, "name")} | {(a.asname or a.name) for s in tree.body if isinstance(s, (ast.Import, ast.ImportFrom)) for a in s.names})
    for q, f in functions(tree):
        scope(q, {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} | {a.arg for a in arguments(f)})
    for c in ast.walk(tree):
        if isinstance(c, ast.ClassDef):
            ids = {s.name for s in c.body if isinstance(s, FUNCTION)} | {s.target.id for s in c.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
            ids |= {n.attr for n in ast.walk(c) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"}
            scope(f"class {c.name}", ids)
    return problems


def apply(root, dry, format_, only_package=False):
    table, locals_, paths, strings = rows("table.tsv"), rows("locals.tsv"), rows("paths.tsv"), rows("strings.tsv")
    problems = []
    outside = external()
    seen = collections.Counter(r[0] for r in table if len(r) < 3 or not r[2])
    problems += [f"table.tsv: {n} stands twice" for n, k in seen.items() if k > 1]
    for row in table:
        if len(row) < 2 or not row[1].isidentifier() or keyword.iskeyword(row[1]) or row[1] in dir(builtins):
            problems.append(f"table.tsv: {row}: not a name to give")
    # 1. locals, in the tree as it is
    files = list(python_files(root))
    cache = {}
    def trees(f):
        if f not in cache: cache[f] = list(functions(ast.parse((root / f).read_text())))
        return cache[f]
    keywords = collections.defaultdict(dict)  # callee -> {old: new}
    sources, stale = {}, []
    moves = moved(paths)
    count = collections.Counter()
    for entry in locals_:
        if len(entry) < 4:
            problems.append(f"locals.tsv: {entry}: four columns expected"); continue
        _, qualified, old, new = entry[:4]
        file, qualified = locate(root, files, trees, entry)
        if file is None:
            stale.append("\t".join(entry)); continue
        if not new.isidentifier() or keyword.iskeyword(new):
            problems.append(f"locals.tsv: {entry}: not a name"); continue
        source = sources.setdefault(file, None) or Source(root / file)
        sources[file] = source
        for q, node in [(q, n) for q, n in functions(source.tree) if q == qualified]:
            if old not in bound(node): continue
            ids = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {a.arg for a in arguments(node)}
            renamed_away = {e[2] for e in locals_ if e[1] == entry[1] and e[0] == entry[0]}
            if new in ids and new not in renamed_away:
                problems.append(f"{file}: {qualified}: {old} -> {new}: there is a {new} already"); continue
            if new in {e[3] for e in locals_ if e[1] == entry[1] and e[0] == entry[0] and e[2] != old}:
                problems.append(f"{file}: {qualified}: two names become {new}"); continue
            for n in occurrences(node, old): source.rename_node(n, old, new)
            for owner, doc in docstring_nodes(node):
                if owner is node: in_docstring(source, doc, {old: new})
            count["locals"] += 1
            if old in {a.arg for a in arguments(node)}:
                parts = qualified.split(".")
                # the class's docstring names the arguments of __init__
                callee = parts[-2] if parts[-1] == "__init__" and len(parts) > 1 else parts[-1]
                keywords[callee][old] = new if keywords[callee].get(old, new) == new else None
    # keyword arguments of renamed parameters, everywhere
    keyword_pattern = re.compile(rf"\b({'|'.join({old for k in keywords.values() for old in k} or ['0'])})\s*=")
    for file in files:
        text = (root / file).read_text()
        if not keyword_pattern.search(text): continue
        tree = sources[file].tree if file in sources else ast.parse(text)
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            callee = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
            inner = call.args[0] if callee == "partial" and call.args else None
            if inner is not None:
                callee = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", None)
            for k in call.keywords:
                if callee in keywords and k.arg in keywords[callee]:
                    if keywords[callee][k.arg] is None:
                        problems.append(f"{file}:{k.lineno}: {callee}({k.arg}=): two functions of that name rename it differently"); continue
                    source = sources.get(file) or Source(root / file); sources[file] = source
                    source.put(k.lineno, k.col_offset, k.arg, keywords[callee][k.arg]); count["keywords"] += 1
    # other bindings of a renamed parameter: a class of the same method, which keeps the old name
    if not dry:
        for source in sources.values(): source.write()
    # 2. global names
    left = []
    for file in files:
        source = Source(root / file)
        variables, attributes = global_map(file, table, False, source), global_map(file, table, True)
        names = {**attributes, **variables}
        if not names: continue
        plain_rows = [r for r in table if not (len(r) > 3 and r[3] == "def")]
        defined = set(variables) - set(global_map(file, plain_rows, False))
        if names.keys().isdisjoint(re.findall(r"\w+", source.text)): continue
        if dry: problems += check_scopes(file, source.tree, variables)
        spots, dotted_before = field_positions(source.tree), False
        for t in tokens(source.text):
            if t.type == 1 and t.string in names:
                line = source.lines[t.start[0] - 1].decode()
                column = len(line[: t.start[1]].encode())
                field = dotted_before or (t.start[0], column) in spots
                new = attributes.get(t.string, None if t.string in defined and variables.get(t.string) else variables.get(t.string)) if field else variables.get(t.string)
                if new is not None:
                    source.put(t.start[0], column, t.string, new); count["tokens"] += 1
            dotted_before = t.string == "."
        docs = {id(d) for _, d in docstring_nodes(source.tree)}
        for owner, doc in docstring_nodes(source.tree): in_docstring(source, doc, names if isinstance(owner, ast.ClassDef) else variables)
        annotations = set()
        for n in ast.walk(source.tree):
            for a in ([n.annotation] if isinstance(n, (ast.arg, ast.AnnAssign)) and n.annotation else []) + ([n.returns] if isinstance(n, FUNCTION) and n.returns else []):
                annotations.update(id(x) for x in ast.walk(a))
        wanted, parametrized = set(), set()
        for n in ast.walk(source.tree):
            if isinstance(n, ast.Call):
                callee = n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
                if callee in ATTR_CALLS: wanted.update(id(a) for a in n.args)
                if callee == "parametrize" and n.args: parametrized.update(id(x) for x in ast.walk(n.args[0]))
            if isinstance(n, ast.Assign) and any(getattr(t, "id", "") in ("__all__", "__slots__") for t in n.targets):
                wanted.update(id(x) for x in ast.walk(n.value))
        for n in ast.walk(source.tree):
            if not (isinstance(n, ast.Constant) and isinstance(n.value, str)) or id(n) in docs: continue
            v = n.value
            dotted = v.startswith("megatron_epp.")
            listed = [r[2] for r in strings if r[1] == v and in_globs(file, r[0])]
            if listed:
                source.put(n.lineno, n.col_offset + 1, v, listed[0])
            elif id(n) in annotations or id(n) in parametrized or (dotted and re.fullmatch(r"[\w.:]+", v)) or (id(n) in wanted and v in names):
                raw = source.lines[n.lineno - 1]
                segment = raw[n.col_offset : n.end_col_offset if n.end_lineno == n.lineno else None]
                for m in re.finditer(rb"\w+", segment):
                    w = m.group().decode()
                    known = variables if id(n) in parametrized else names
                    if w in known: source.put(n.lineno, n.col_offset + m.start(), w, known[w])
            elif v in names:
                left.append(f"{file}:{n.lineno}: string {v!r} stays ({v} -> {names[v]})")
        # comments: ``old`` or old() of distinctive names
        if not dry: source.write()
    # 3. modules
    if paths and not dry:
        move_modules(root, paths)
    for row in table:
        if row[0] in outside: problems.append(f"table.tsv: {row[0]} is a name of Megatron, torch or the library, too: look")
    for line in problems: print("PROBLEM", line)
    for line in left: print("STRING", line)
    for line in stale: print("STALE", line)
    print(f"{dict(count)}; {len(stale)} stale, {len(problems)} problems")
    if not dry and format_:
        changed = subprocess.run(["git", "diff", "--name-only", "HEAD", "--", "*.py"], cwd=root, capture_output=True, text=True).stdout.split()
        changed = [f for f in changed if (root / f).exists()]
        for args in (["check", "-q", "--select", "I,F401", "--fix"], ["format", "-q"]):
            subprocess.run([f"{BIN}/ruff", *args, *changed], cwd=root)
        for file in changed: reflow(root / file)
        subprocess.run([f"{BIN}/ruff", "format", "-q", *changed], cwd=root)


def reflow(path):
    """Break lines of docstrings and comments that a longer name has made longer than 100: the rest goes to the front of
    the next line of the paragraph."""
    lines = path.read_text().split("\n")
    if not any(len(line) > 100 for line in lines): return
    text_lines = set()
    for owner, doc in docstring_nodes(ast.parse("\n".join(lines))): text_lines.update(range(doc.lineno, doc.end_lineno + 1))
    at = 0
    while at < len(lines):
        line = lines[at]
        stripped = line.lstrip()
        indent = line[: len(line) - len(stripped)]
        comment = stripped.startswith("# ")
        doc = (at + 1) in text_lines
        if len(line) > 100 and (comment or doc) and "# noqa" not in line:
            columns = re.match(r"(\s*\S+   +)\S", line) if doc and not stripped.startswith('"""') else None
            lead = "# " if comment else ""
            hang = " " * len(columns[1]) if columns else indent + lead
            closing = '"""' if doc and stripped.endswith('"""') and stripped != '"""' and len(stripped) > 3 else ""
            body = line.removesuffix(closing)
            cut = body.rfind(" ", len(hang) + 1, 101)
            if cut <= len(hang): at += 1; continue
            first, rest = body[:cut].rstrip(), body[cut:].strip()
            following = lines[at + 1] if at + 1 < len(lines) else ""
            joins = not closing and following.strip() not in ("", "#", '"""') and following.startswith(hang) and not following[len(hang):].startswith((" ", "- ", "* ", ">>>")) and (not comment or following.lstrip().startswith("# ")) and not (columns is None and doc and re.match(r"\s*\S+   +\S", following))
            if joins:
                lines[at : at + 2] = [first, f"{hang}{rest} {following[len(hang):]}"]
            else:
                lines[at : at + 1] = [first, f"{hang}{rest}{closing}"]
                text_lines = {n + 1 if n > at + 1 else n for n in text_lines} | ({at + 2} if doc else set())
        elif len(line) > 100 and (literal := re.fullmatch(r"(\s*)(return )?((?:[rf]?)\")([^\"]*(?:\{[^}]*\}[^\"]*)*)(\"[,)]*)", line)):
            # a string of its own line: two strings, cut at a space outside of braces
            indent, returns, start, body, end = literal.groups()
            if returns: indent += "    "
            most, depth, cut = 98 - len(indent) - len(start), 0, 0
            for place, character in enumerate(body[:most]):
                depth += {"{": 1, "}": -1}.get(character, 0)
                if character == " " and depth == 0: cut = place + 1
            if cut:
                first, rest = body[:cut], body[cut:]
                lines[at : at + 1] = [f"{indent}{start if '{' in first else start.replace('f', '')}{first}\"", f"{indent}{start if '{' in rest else start.replace('f', '')}{rest}{end}"]
                if returns:
                    lines[at : at + 2] = [f"{indent[4:]}return (", lines[at], lines[at + 1], f"{indent[4:]})"]
                    at += 2
                at += 1
        at += 1
    path.write_text("\n".join(lines))


def move_modules(root, paths):
    modules = {module_of(o): module_of(n) for o, n, *_ in paths if o.endswith(".py")}
    done = []
    for old, new, *_ in paths:
        if not (root / old).exists():
            print("STALE path", old); continue
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        if old.endswith(".py") and not old.startswith(("tests/", "scripts/", "examples/")) and not (root / new).parent.joinpath("__init__.py").exists():
            print("PROBLEM no __init__.py in", pathlib.PurePath(new).parent)
        subprocess.run(["git", "mv", old, new], cwd=root, check=True)
        done.append((old, new))
    for file in python_files(root):
        source = Source(root / file)
        local = {}
        for n in ast.walk(source.tree):
            if isinstance(n, ast.ImportFrom) and n.module and not n.level:
                if n.module in modules:
                    _dotted(source, n.lineno, n.module, modules[n.module])
                for a in n.names:
                    full = f"{n.module}.{a.name}"
                    if full in modules:
                        package, leaf = modules[full].rsplit(".", 1)
                        source.put(a.lineno, a.col_offset, a.name, leaf if a.asname else leaf)
                        if a.asname is None: local[a.name] = leaf
                        if package != n.module:
                            if len(n.names) == 1: _dotted(source, n.lineno, n.module, package)
                            else: print(f"PROBLEM {file}:{n.lineno}: {full} moves out of a shared import")
            elif isinstance(n, ast.Import):
                for a in n.names:
                    if a.name in modules: source.put(a.lineno, a.col_offset, a.name, modules[a.name])
            elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.lineno == n.end_lineno:
                for o, w in modules.items():
                    if re.search(rf"\b{re.escape(o)}\b", n.value): _dotted(source, n.lineno, o, w)
        for n in ast.walk(source.tree):
            if isinstance(n, ast.Name) and n.id in local:
                shadow = False
                source.put(n.lineno, n.col_offset, n.id, local[n.id])
        source.write()
    # texts: paths and dotted names
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True).stdout.split("\n")
    for name in listed:
        p = root / name
        if not name or name == "docs/renames.tsv" or p.suffix not in (".md", ".sh", ".yml", ".yaml", ".toml", ".in", ".cfg", ".py", ".patch", ".txt") or not p.exists() or name.startswith("tests/golden"): continue
        text = old_text = p.read_text(errors="surrogateescape")
        for old, new in done:
            text = re.sub(rf"(?<![\w/]){re.escape(old)}(?!\w)", new, text)
            short_old, short_new = old.removeprefix("megatron_epp/"), new.removeprefix("megatron_epp/")
            if "/" in short_old: text = re.sub(rf"(?<![\w/]){re.escape(short_old)}(?!\w)", short_new, text)
            if old.endswith(".py"): text = re.sub(rf"\b{re.escape(module_of(old))}\b(?!\.py)", module_of(new), text)
        if text != old_text: p.write_text(text, errors="surrogateescape")


def _dotted(source, line, old, new):
    for number in range(line, min(line + 3, len(source.lines)) + 1):
        for m in re.finditer(rb"(?<![\w.])" + re.escape(old.encode()) + rb"(?![\w])", source.lines[number - 1]):
            source.put(number, m.start(), old, new)
            return


def do_renames(root):
    """Paths, and every module-level and class-level name of the package, public or not in a class's body."""
    table = rows("table.tsv")
    moves = moved(rows("paths.tsv"))
    for old, new in moves.items(): print(old, new, sep="\t")
    for file in python_files(root, True):
        source = Source(root / file)
        variables, attributes = global_map(file, table, False, source), global_map(file, table, True)
        before = module_of(file).removeprefix("megatron_epp.")
        after = module_of(moves.get(file, file)).removeprefix("megatron_epp.")
        def show(prefix, node, names):
            for name in names:
                new = attributes.get(name, variables.get(name)) if prefix else variables.get(name)
                if new and not name.startswith("_"): print(f"{before}.{prefix}{name}", f"{after}.{renamed(prefix)}{new}", sep="\t")
        def renamed(prefix): return "".join(variables.get(p, p) + "." for p in prefix.split(".") if p)
        def bound_here(body):
            for s in body:
                if isinstance(s, FUNCTION + (ast.ClassDef,)): yield s.name
                elif isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name): yield s.target.id
                elif isinstance(s, ast.Assign):
                    for t in s.targets: yield from (n.id for n in ast.walk(t) if isinstance(n, ast.Name))
        show("", source.tree, bound_here(source.tree.body))
        for c in source.tree.body:
            if isinstance(c, ast.ClassDef): show(f"{c.name}.", c, bound_here(c.body))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("list", "functions", "check", "apply", "renames"))
    p.add_argument("root", type=pathlib.Path)
    p.add_argument("words", nargs="*")
    p.add_argument("--under", nargs="*")
    p.add_argument("--all", action="store_true")
    p.add_argument("--no-format", action="store_true")
    o = p.parse_args()
    if o.what == "list": do_list(o.root, o.all)
    elif o.what == "renames": do_renames(o.root)
    elif o.what == "functions": do_functions(o.root, set(o.words), o.under)
    else: apply(o.root, o.what == "check", not o.no_format)


if __name__ == "__main__":
    main()
