#!/bin/sh
# Run the tests of exported models on the newest transformers 4: an environment of it and its own dependencies alone,
# which takes everything else from .venv. Usage: tests/hf/transformers4.sh [pytest arguments]
set -eu
cd "$(dirname "$0")/../.."
environment=.venv/transformers4
if [ ! -e "$environment/ready" ]; then
    .venv/bin/python -m venv --clear "$environment"
    site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # addsitedir follows that folder's own .pth files too: this project is installed by one
    rest=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$rest')" > "$site/rest.pth"
    # --ignore-installed: .venv has these packages too, in the versions that transformers 5 needs
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --ignore-installed --no-deps \
        transformers==4.57.6 huggingface-hub==0.36.2 tokenizers==0.22.2
    touch "$environment/ready"
fi
exec "$environment/bin/python" -m pytest tests/hf "$@"
