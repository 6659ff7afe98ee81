#!/usr/bin/env bash
# Rehearses a release on this machine, up to the upload: `make rehearsal`. Builds the sdist, from it
# the wheel, and makes that a wheel for other Linux systems; checks what PyPI checks; and installs
# both from an index in build/rehearsal, each in an empty environment. Run it in the root.
set -euo pipefail

work=$PWD/build/rehearsal
index=$work/index/fastdraft
smoke=$PWD/tests/package/package_smoke.py
python=${PYTHON:-python3}
export FASTDRAFT_REPOSITORY=${FASTDRAFT_REPOSITORY:-https://github.com/OWNER/fastdraft}
rm -rf "$work" && mkdir -p "$index"

echo "::: the sdist, and the wheel that it builds"
python -m build --no-isolation --outdir "$work/built" > "$work/build.log" \
  || { cat "$work/build.log"; exit 1; }
auditwheel repair --wheel-dir "$index" "$work"/built/*.whl
cp "$work"/built/*.tar.gz "$index"
ls -l "$index"

echo "::: what PyPI checks"
twine check --strict "$index"/*
python - "$index"/*.whl << 'PYTHON'
import email
import re
import sys
import zipfile
from pathlib import Path

from trove_classifiers import classifiers

with zipfile.ZipFile(sys.argv[1]) as wheel:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
unknown = set(metadata.get_all("Classifier")) - classifiers
assert not unknown, unknown
urls = metadata.get_all("Project-URL") or []
assert any(url.startswith("Repository, https://") for url in urls), "there is no [project.urls]"
relative = re.findall(r"\]\((?!https://|#)[^)]*\)", metadata.get_payload())
assert not relative, f"on PyPI these lead nowhere: {relative}"
version = metadata["Version"]
changelog = Path("CHANGELOG.md").read_text("utf-8")
print("fastdraft", version, *urls, sep="\n  ")
if f"\n## [{version}] - " not in changelog:
    print(f"CHANGELOG.md has no heading for {version} yet: see docs/contributing/maintaining.md")
PYTHON

(cd "$index" && for file in *; do echo "<a href=\"$file\">$file</a><br>"; done > index.html)
# The index has nothing but fastdraft: what that needs is installed first, from where pip looks.
for kind in wheel sdist; do
  echo "::: pip install fastdraft, from the $kind"
  "$python" -m venv "$work/$kind"
  pip=$work/$kind/bin/pip
  if [ $kind = wheel ]; then
    "$pip" install -qq numpy
    "$pip" install -qq --index-url "file://$work/index" --only-binary fastdraft fastdraft
  else
    "$pip" install -qq numpy -r tools/build.txt
    env -u PIP_BUILD_CONSTRAINT "$pip" install -qq --index-url "file://$work/index" --no-binary fastdraft \
      --no-build-isolation fastdraft
  fi
  (cd "$work" && "$kind/bin/python" -W error "$smoke")
done
"$work/wheel/bin/pip" install -qq 'fastdraft[cli]'
# What the front page promises without PyTorch: the sample, and a log with its page.
(
  cd "$work"
  wheel/bin/python -W error "$smoke"
  if wheel/bin/python -c 'import torch' 2> import.log; then echo "[cli] installs PyTorch" >&2; exit 1; fi
  wheel/bin/fastdraft replay --sample > replay.log
  printf '%s\n' '{"request": {}, "response": {"prompt_token_ids": [1, 2, 3], "choices": [{"token_ids": [1, 2, 3, 1, 2, 3]}]}}' \
    | gzip > log.jsonl.gz
  wheel/bin/fastdraft replay log.jsonl.gz --html page.html >> replay.log
  grep -q '1 recorded requests, replayed' page.html
)
echo "The release could be uploaded: $index"
