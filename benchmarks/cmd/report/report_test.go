package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"example.com/grpcretry/benchmarks/behaviour"
	"example.com/grpcretry/benchmarks/costs"
	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/benchmarks/streams"
)

// sample are results in which every peer does the same.
func sample() *page {
	p := &page{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	plan := behaviour.FullPlan
	for _, peer := range peers.All {
		for _, failing := range plan.Failing {
			for _, workers := range plan.Workers {
				p.Outages = append(p.Outages, behaviour.Outage{Peer: peer.Name, Failing: failing, Workers: workers, Calls: 100, OK: 50, FirstOK: 50, Requests: 110})
			}
		}
		for _, tiers := range plan.Tiers {
			p.Chains = append(p.Chains, behaviour.Chain{Peer: peer.Name, Tiers: tiers, Calls: 10, Requests: make([]int, tiers)})
		}
		p.Replicas = append(p.Replicas, behaviour.Replica{Peer: peer.Name, Calls: 100, OK: 99, Requests: 110})
		for _, warm := range plan.Warm {
			p.Kills = append(p.Kills, behaviour.Kill{Peer: peer.Name, Warm: warm, Victims: 22, Lost: 3})
		}
		p.Updates = append(p.Updates, behaviour.Update{Peer: peer.Name, Rounds: 2, Calls: 10, Quiet: []int{1, 0}, Updated: []int{1, 0}})
		for _, kind := range plan.Kinds {
			for _, load := range plan.Loads {
				p.Results.Pulses = append(p.Results.Pulses, behaviour.Pulse{Peer: peer.Name, Kind: kind, Load: load, Bin: time.Second, From: 5 * time.Second, To: 7 * time.Second, Bins: bins(12, 9), Requests: 130})
			}
		}
	}
	for i, h := range peers.Hedgers {
		for _, when := range []string{"after 15ms", "at the quantile 0.9"} {
			if h.Name == peers.None {
				when = ""
			}
			p.Hedgings = append(p.Hedgings, behaviour.Hedging{Hedger: h.Name, When: when, Calls: 100, Requests: 105, Tail: make([]time.Duration, len(behaviour.Quantiles)), SlowCalls: 10})
			if i == 0 {
				break
			}
		}
	}
	for _, j := range behaviour.Jitters {
		p.Contentions = append(p.Contentions, behaviour.Contentions{Jitter: j.String(), Runs: 3})
	}
	for _, c := range streams.Cases {
		for _, peer := range streams.Peers {
			p.streams = append(p.streams, streams.Figure{Case: c.Name, Peer: peer.Name, Ratio: costs.Interval{Mid: 1, Low: 0.9, High: 1.1}})
		}
	}
	return p
}

// bins are so many seconds of ten calls each, none of which is answered from the fifth until that one.
func bins(n, recovered int) []behaviour.Bin {
	list := make([]behaviour.Bin, n)
	for i := range list {
		list[i] = behaviour.Bin{Made: 10, Answered: 10}
		if i >= 5 && i < recovered {
			list[i].Answered = 0
		}
	}
	return list
}

// A page that hides where another one is better, or claims it where it is not,
// is worth nothing: each of these follows the figures.
func TestPageSaysWhoIsBetter(t *testing.T) {
	if text := sample().markdown(); strings.Contains(text, "**Better than ours") || strings.Contains(text, "NaN") {
		t.Errorf("somebody is better though all are alike, or nothing was counted:\n%s", text)
	}
	find := func(p *page, peer string) *behaviour.Pulse {
		for i := range p.Results.Pulses {
			if p.Results.Pulses[i].Peer == peer && p.Results.Pulses[i].Kind == behaviour.Failures {
				return &p.Results.Pulses[i]
			}
		}
		t.Fatalf("no pulse of %s", peer)
		return nil
	}
	for name, test := range map[string]struct {
		change func(*page)
		want   string
	}{
		"recovery": {func(p *page) { find(p, "native").Bins = bins(12, 8) }, "at recovering: native."},
		"losses":   {func(p *page) { find(p, "gax").Bins = bins(12, 8) }, "at calls lost to failures: gax."},
		"load":     {func(p *page) { p.Outages[len(p.Outages)-9].Requests-- }, "at load in a total outage: sethvargo."},
		"half":     {func(p *page) { p.Outages[len(p.Outages)-4].OK++ }, "at success while half fails: sethvargo."},
		"replica":  {func(p *page) { p.Replicas[2].OK++ }, "at success: middleware."},
		"kill":     {func(p *page) { p.Kills[4].Lost = 0 }, "just started: middleware."},
		"tiers":    {func(p *page) { p.Chains[3].Requests[4] = 20 }, "at load over five tiers: middleware, failsafe"},
		"tail":     {func(p *page) { p.Hedgings[1].Tail[3] = time.Millisecond }, "at the tail: failsafe, after 15ms (95%: 0.0 ms, ours 1.0 ms)"},
		"streams":  {func(p *page) { p.streams[2].Ratio.High = 0.8 }, "beyond the intervals: native"},
	} {
		t.Run(name, func(t *testing.T) {
			p := sample()
			test.change(p)
			if text := p.markdown(); !strings.Contains(text, test.want) {
				t.Errorf("the page does not say %q", test.want)
			}
		})
	}
}

// A picture that differs though the figures do not would show in every commit
// of the report; and it must be one.
func TestPictures(t *testing.T) {
	first, err := drawAll(sample().Results)
	if err != nil {
		t.Fatal(err)
	}
	again, err := drawAll(sample().Results)
	if err != nil {
		t.Fatal(err)
	}
	text := sample().markdown()
	for name, picture := range first {
		if !bytes.Equal(picture, again[name]) {
			t.Errorf("%s was drawn in two ways", name)
		}
		d := xml.NewDecoder(bytes.NewReader(picture))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Errorf("%s: %v", name, err)
				break
			}
		}
		if !strings.Contains(text, "(report/"+name+")") {
			t.Errorf("the page does not show %s", name)
		}
	}
	if n := strings.Count(text, ".svg)"); n != len(first) {
		t.Errorf("the page shows %d pictures, want %d", n, len(first))
	}
	broken := sample()
	broken.Results.Pulses = broken.Results.Pulses[:1]
	if _, err := drawAll(broken.Results); err == nil {
		t.Error("a line that is missing was not missed")
	}
}
