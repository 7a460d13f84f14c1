package main

import (
	"bytes"
	"image/color"
	"math"
	"strconv"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	canvas "gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The picture is 800 by 500 pixels, at 96 to the inch.
const width, height = 800 * vg.Inch / 96, 500 * vg.Inch / 96

// styles are how the plans are drawn: told apart by their dashes too, for those
// who do not see the colours.
var styles = []canvas.LineStyle{
	{Color: color.RGBA{R: 0xd5, G: 0x5e, A: 0xff}, Width: vg.Points(2)},
	{Color: color.RGBA{G: 0x72, B: 0xb2, A: 0xff}, Width: vg.Points(2)},
	{Color: color.RGBA{G: 0x9e, B: 0x73, A: 0xff}, Width: vg.Points(2), Dashes: []vg.Length{vg.Points(8), vg.Points(4)}},
	{Color: color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, Width: vg.Points(2), Dashes: []vg.Length{vg.Points(2), vg.Points(3)}},
}

// draw gives the picture as SVG: what share of the calls took longer than x. Both
// axes are logarithmic, because it is about the few slowest. They are so by taking
// logarithms here: with the library's own scale a long label moves the plot down.
func draw(all []figures) ([]byte, error) {
	p := plot.New()
	p.Title.Text = usual.title
	p.X.Label.Text, p.Y.Label.Text = "x, milliseconds", "calls that took longer than x, percent"
	p.X.Tick.Marker = marks{5, 10, 15, 20, 30, 50, 70, 100, 150, 200}
	p.Y.Tick.Marker = marks{0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100}
	for _, s := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		s.Font.Variant, s.Font.Size = "Sans", vg.Points(11)
	}
	p.Title.Padding, p.X.Label.Padding, p.Y.Label.Padding = vg.Points(8), vg.Points(4), vg.Points(4)
	p.Legend.Left, p.Legend.ThumbnailWidth, p.Legend.Padding = true, vg.Points(30), vg.Points(3) // below on the left there are no lines
	p.Legend.XOffs, p.Legend.YOffs = vg.Points(8), vg.Points(8)
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{0xdd}, color.Gray{0xdd}
	p.Add(grid)
	for i, f := range all {
		line, err := plotter.NewLine(slowerThan(f.took))
		if err != nil {
			return nil, err
		}
		line.LineStyle, line.StepStyle = styles[i%len(styles)], plotter.PostStep
		p.Add(line)
		p.Legend.Add(f.plan.name, line)
	}
	p.X.Min, p.X.Max = math.Log10(5), max(math.Log10(200), p.X.Max)
	p.Y.Min, p.Y.Max = math.Log10(0.1), math.Log10(100)

	c := vgsvg.New(width, height)
	p.Draw(canvas.Crop(canvas.New(c), vg.Points(8), vg.Points(-12), vg.Points(8), vg.Points(-8)))
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		return nil, err
	}
	// Where the font is not installed another one without serifs will do.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")), nil
}

// slowerThan gives points of the curve: the logarithms of x in milliseconds and of
// the share of longer times in percent. There are at most 50 for each power of ten
// of the share, because more cannot be seen.
func slowerThan(sorted []time.Duration) plotter.XYs {
	n := len(sorted)
	points := plotter.XYs{point(sorted[0], 1)}
	for longer := n - 1; longer >= max(n/1000, 1); longer = min(longer-1, int(float64(longer)*math.Pow(10, -1./50))) {
		points = append(points, point(sorted[n-1-longer], float64(longer)/float64(n)))
	}
	return points
}

func point(x time.Duration, longer float64) plotter.XY {
	return plotter.XY{X: math.Log10(float64(x) / float64(time.Millisecond)), Y: math.Log10(100 * longer)}
}

// marks are the numbers beside a logarithmic axis.
type marks []float64

// Ticks gives those of them that the axis has.
func (m marks) Ticks(least, most float64) []plot.Tick {
	var ticks []plot.Tick
	for _, v := range m {
		if at := math.Log10(v); least <= at && at <= most {
			ticks = append(ticks, plot.Tick{Value: at, Label: strconv.FormatFloat(v, 'g', -1, 64)})
		}
	}
	return ticks
}
