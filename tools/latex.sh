#!/usr/bin/env bash
# Installs what the PDF needs where apt-get can be used without asking, and says what is missing otherwise.
# Exit status 0: the PDF can be made; 3: it cannot.
set -euo pipefail

packages=(texlive-latex-recommended texlive-latex-extra texlive-fonts-recommended texlive-xetex latexmk fonts-freefont-otf)
have() { command -v xelatex >/dev/null && command -v latexmk >/dev/null; }

have && exit 0
if command -v apt-get >/dev/null; then
  sudo=()
  [[ $(id -u) == 0 ]] || sudo=(sudo -n)
  if [[ ${#sudo[@]} == 0 ]] || sudo -n true 2>/dev/null; then
    echo "installing LaTeX for the PDF (about 112 MB)"
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
  fi
fi
have && exit 0
echo "No PDF: xelatex and latexmk are not installed. On Debian or Ubuntu:" >&2
echo "  sudo apt-get install -y --no-install-recommends ${packages[*]}" >&2
echo "Elsewhere: TeX Live with XeLaTeX, latexmk and the GNU FreeFont family." >&2
exit 3
