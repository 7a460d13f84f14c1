package main

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"example.com/grpcretry/benchmarks/behaviour"
	"example.com/grpcretry/benchmarks/peers"
)

// line is how something is drawn, wherever it appears.
type line struct {
	name, label string
	color       color.RGBA
	width       vg.Length
	dashes      []vg.Length
}

var lines = []line{
	{"middleware", "up to three retries, no budget (middleware)", color.RGBA{213, 94, 0, 255}, 2.5, nil},
	{"failsafe-budget", "budget by a share of what is in flight (failsafe-budget)", color.RGBA{204, 121, 167, 255}, 1.5, []vg.Length{6, 3}},
	{peers.None, "no retry at all", color.RGBA{90, 90, 90, 255}, 1.5, nil},
	{peers.Ours, "grpcretry, default budget", color.RGBA{0, 114, 178, 255}, 2.5, nil},
}

// pulses are those that are drawn.
var pulses = []struct {
	file string
	kind behaviour.Kind
	load float64
}{
	{"stall-93.svg", behaviour.Stall, 0.93},
	{"stall-70.svg", behaviour.Stall, 0.7},
	{"failures-93.svg", behaviour.Failures, 0.93},
	{"overload-93.svg", behaviour.Overload, 0.93},
}

// drawAll makes all pictures, by the names of their files.
func drawAll(r behaviour.Results) (map[string][]byte, error) {
	pictures := map[string][]byte{}
	for _, d := range pulses {
		p, err := goodput(r, d.kind, d.load)
		if err == nil {
			pictures[d.file], err = svg(p)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.file, err)
		}
	}
	for file, make := range map[string]func(behaviour.Results) (*plot.Plot, error){"outage.svg": outage, "hedging.svg": hedging} {
		p, err := make(r)
		if err == nil {
			pictures[file], err = svg(p)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	return pictures, nil
}

func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.Padding = vg.Points(6)
	p.Add(plotter.NewGrid())
	return p
}

func svg(p *plot.Plot) ([]byte, error) {
	c := vgsvg.New(22*vg.Centimeter, 11*vg.Centimeter)
	p.Draw(draw.New(c))
	var b bytes.Buffer
	_, err := c.WriteTo(&b)
	return b.Bytes(), err
}

// goodput is the share of the calls of each second that were answered.
func goodput(r behaviour.Results, kind behaviour.Kind, load float64) (*plot.Plot, error) {
	p := newPlot(fmt.Sprintf("Calls answered: %s at %.0f%% load", kind, 100*load), "seconds from the end of the pulse; the pulse is shaded", "answered in time, % of the calls made")
	p.Y.Min, p.Y.Max = 0, 155
	p.Y.Tick.Marker = ticks(0, 20, 40, 60, 80, 100)
	p.X.Tick.Marker = ticks(0, 10, 20, 30, 40, 50, 60)
	p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, vg.Points(1)
	var labelled []line
	for _, l := range lines {
		for _, pulse := range r.Pulses {
			if pulse.Peer != l.name || pulse.Kind != kind || pulse.Load != load {
				continue
			}
			if len(labelled) == 0 {
				shade, err := plotter.NewPolygon(plotter.XYs{{X: (pulse.From - pulse.To).Seconds()}, {}, {Y: 100}, {X: (pulse.From - pulse.To).Seconds(), Y: 100}})
				if err != nil {
					return nil, err
				}
				shade.Color, shade.LineStyle.Width = color.RGBA{225, 225, 225, 255}, 0
				p.Add(shade)
			}
			labelled = append(labelled, l)
			drawn, err := plotter.NewLine(perSecond(pulse))
			if err != nil {
				return nil, err
			}
			drawn.Color, drawn.Width, drawn.Dashes = l.color, l.width, l.dashes
			p.Add(drawn)
			p.Legend.Add(l.label, drawn)
		}
	}
	if len(labelled) != len(lines) {
		return nil, fmt.Errorf("%d lines to draw, want %d", len(labelled), len(lines))
	}
	return p, nil
}

// perSecond joins bins, from five seconds before the pulse on.
func perSecond(pulse behaviour.Pulse) (xys plotter.XYs) {
	step := max(1, int(time.Second/pulse.Bin))
	for i := 0; i+step <= len(pulse.Bins); i += step {
		var sum behaviour.Bin
		for _, b := range pulse.Bins[i : i+step] {
			sum.Made += b.Made
			sum.Answered += b.Answered
		}
		x := (time.Duration(i)*pulse.Bin + time.Duration(step)*pulse.Bin/2 - pulse.To).Seconds()
		if x > (pulse.From-pulse.To).Seconds()-5 {
			xys = append(xys, plotter.XY{X: x, Y: 100 * sum.Goodput()})
		}
	}
	return xys
}

// outage is what a total one does to the server.
func outage(r behaviour.Results) (*plot.Plot, error) {
	p := newPlot("A total outage, 64 callers", "", "requests for each call")
	var values plotter.Values
	var names []string
	for _, o := range r.Outages {
		if o.Failing == 1 && o.Workers == 64 {
			values, names = append(values, o.Amplification()), append(names, o.Peer)
		}
	}
	bars, err := plotter.NewBarChart(values, vg.Points(28))
	if err != nil {
		return nil, err
	}
	bars.Color, bars.LineStyle.Width = lines[len(lines)-1].color, 0
	p.Add(bars)
	p.NominalX(names...)
	p.Y.Min, p.Y.Max = 0, float64(behaviour.Config.MaxAttempts)+0.2
	return p, nil
}

// hedging is the tail of the latencies.
func hedging(r behaviour.Results) (*plot.Plot, error) {
	p := newPlot("Replies of about 10 ms, one in twenty ten times slower", "share of the calls, %", "answered within, ms")
	nines := func(q float64) float64 { return -math.Log10(1 - q) }
	for _, q := range behaviour.Quantiles {
		if q == 0.97 || q == 0.96 {
			continue // no room
		}
		p.X.Tick.Marker = append(tickList(p.X.Tick.Marker), plot.Tick{Value: nines(q), Label: fmt.Sprintf("%.4g", 100*q)})
	}
	p.Y.Min, p.Y.Max = 0, 160
	p.Y.Tick.Marker = ticks(0, 20, 40, 60, 80, 100, 120)
	p.Legend.Top, p.Legend.Left = true, true
	colors := []color.RGBA{{90, 90, 90, 255}, {0, 114, 178, 255}, {86, 180, 233, 255}, {213, 94, 0, 255}}
	n := 0
	for _, h := range r.Hedgings {
		if h.Hedger == "failsafe" || h.Hedger == "failsafe-budget" && h.When != r.Hedgings[1].When {
			continue // the same line as ours, or nearly so
		}
		if n == len(colors) {
			return nil, fmt.Errorf("more than %d lines to draw", n)
		}
		var xys plotter.XYs
		for i, q := range behaviour.Quantiles {
			xys = append(xys, plotter.XY{X: nines(q), Y: float64(h.Tail[i]) / float64(time.Millisecond)})
		}
		drawn, err := plotter.NewLine(xys)
		if err != nil {
			return nil, err
		}
		drawn.Color, drawn.Width = colors[n], 2
		if h.Hedger == "failsafe-budget" {
			drawn.Dashes = []vg.Length{6, 3}
		}
		n++
		p.Add(drawn)
		p.Legend.Add(hedgerName(h), drawn)
	}
	return p, nil
}

func hedgerName(h behaviour.Hedging) string {
	if h.When == "" {
		return h.Hedger
	}
	return h.Hedger + ", " + h.When
}

// tickList starts a list in place of the ticks that a plot has by itself.
func tickList(t plot.Ticker) plot.ConstantTicks {
	list, _ := t.(plot.ConstantTicks)
	return list
}

func ticks(values ...float64) (list plot.ConstantTicks) {
	for _, v := range values {
		list = append(list, plot.Tick{Value: v, Label: fmt.Sprintf("%.0f", v)})
	}
	return list
}
