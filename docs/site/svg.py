"""A few shapes of SVG, for docs/site/pictures.py."""

from pathlib import Path
from xml.sax.saxutils import escape

INK, FAINT, PAPER, RULE = "#1f2937", "#6b7280", "#ffffff", "#9ca3af"
# Told apart by most eyes, and in gray: Okabe and Ito's colors, lightened.
COLORS = ("#9fc9e8", "#f6c27a", "#8fd1b5", "#e8a9c6", "#f3e58a", "#b9b3e6", "#e79a78", "#c9d1d9")
_FONT = "DejaVu Sans, Verdana, sans-serif"
_CHARACTER = 0.62  # mean width of a character, in font sizes


class Drawing:
    """Shapes on white paper, so that pages with dark colors show them too. All numbers are pixels."""

    def __init__(self, width: int, height: int, title: str):
        self._size, self._title = (width, height), title
        self._shapes = [f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>']

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "start", color: str = INK) -> None:
        """words, with their baseline at y. Lines do not wrap: asserts that they fit the paper."""
        width = len(words) * size * _CHARACTER
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
        assert left >= -1 and left + width <= self._size[0] + 1 and y <= self._size[1], f"does not fit: {words}"
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str = "", size: int = 12) -> None:
        """A rectangle with words in its middle."""
        assert x >= 0 and y >= 0 and x + width <= self._size[0] and y + height <= self._size[1], f"does not fit: {words}"
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{RULE}"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + size * 0.36, words, size, "middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._shapes.append(f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK}" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        width, height = self._size
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        size = f'viewBox="0 0 {width} {height}" width="{width}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" role="img">'
        defs = f'<title>{escape(self._title)}</title>\n<defs>{tip}<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        return "\n".join([head, defs, *self._shapes, "</svg>"]) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.svg(), encoding="utf-8")
