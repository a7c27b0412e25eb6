// Holds a dashboard to the types that Grafana generates from its own schemas: dashboard-schema FILE.json
// Unknown fields, wrong types and what is missing are errors: of the dashboard, of each panel's options and fields by the
// panel's type, of each query by its data source.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

// What the type of a dashboard leaves open, as it depends on the panel's type and data source.
type panel struct {
	Type, Title string
	Datasource  struct{ Type string }
	Targets     []json.RawMessage
	Options     json.RawMessage
	FieldConfig struct {
		Defaults struct{ Custom json.RawMessage }
	}
}

// The strict decoders return a list of what is wrong, also where that is empty.
func wrong(err error) error {
	if err != nil && err.Error() == "" {
		return nil
	}
	return err
}

func (p panel) judge() error {
	kind, known := cog.ConfigForPanelcfgVariant(p.Type)
	if !known {
		return fmt.Errorf("Grafana has no panel %q", p.Type)
	}
	for _, part := range []struct {
		name   string
		raw    json.RawMessage
		strict func([]byte) (any, error)
	}{{"options", p.Options, kind.StrictOptionsUnmarshaler}, {"fieldConfig.defaults.custom", p.FieldConfig.Defaults.Custom, kind.StrictFieldConfigUnmarshaler}} {
		if part.raw == nil {
			continue
		}
		if part.strict == nil {
			return fmt.Errorf("%s: a panel %q has none", part.name, p.Type)
		}
		if _, err := part.strict(part.raw); wrong(err) != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	if len(p.Targets) == 0 {
		return errors.New("it asks nothing")
	}
	for i, raw := range p.Targets {
		query, err := cog.StrictUnmarshalDataquery(raw, p.Datasource.Type)
		if wrong(err) != nil {
			return fmt.Errorf("targets[%d]: %w", i, err)
		}
		if _, unknown := query.(variants.UnknownDataquery); unknown {
			return fmt.Errorf("targets[%d]: no known data source (%q)", i, p.Datasource.Type)
		}
	}
	return nil
}

func judge(path string) (int, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	plugins.RegisterDefaultPlugins()
	board, open := dashboard.Dashboard{}, struct{ Panels []panel }{}
	if err := board.UnmarshalJSONStrict(raw); wrong(err) != nil {
		return 0, err
	}
	if err := json.Unmarshal(raw, &board); err != nil {
		return 0, err
	}
	if err := board.Validate(); err != nil {
		return 0, err
	}
	if err := json.Unmarshal(raw, &open); err != nil {
		return 0, err
	}
	for _, p := range open.Panels {
		if err := p.judge(); err != nil {
			return 0, fmt.Errorf("panel %q: %w", p.Title, err)
		}
	}
	return len(open.Panels), nil
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "dashboard-schema FILE.json")
		os.Exit(2)
	}
	panels, err := judge(os.Args[1])
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
	fmt.Printf("%d panels as Grafana's schemas have them\n", panels)
}
