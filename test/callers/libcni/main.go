// libcni calls the plugins of a conflist through the library that container runtimes link, the way a runtime does:
//
//	libcni validate|add|check|del|cached CONFLIST CONTAINER NETNS
//	libcni storm CONFLIST CONTAINER NETNS ROUNDS DELS WORKERS
//
// CNI_PATH lists the plugin folders, CAP_ARGS holds the capability arguments as JSON (cnitool reads them there too),
// CNI_IFNAME the interface (eth0). NETNS may be empty, as after a reboot. The result cache is the library's own,
// /var/lib/cni. Prints one JSON document and exits 0, or writes the library's error to stderr and exits 1.
// "storm" adds the sandbox and tears it down with DELS calls, WORKERS of them at a time, ROUNDS times over, and
// prints every error it saw.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

const timeout = 60 * time.Second

type attachment struct {
	cni     *libcni.CNIConfig
	network *libcni.NetworkConfigList
	runtime *libcni.RuntimeConf
}

func main() {
	printed, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(printed); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) (interface{}, error) {
	if len(args) < 4 {
		return nil, fmt.Errorf("usage: libcni validate|add|check|del|cached|storm CONFLIST CONTAINER NETNS ...")
	}
	a, err := open(args[1], args[2], args[3])
	if err != nil {
		return nil, err
	}
	switch verb := args[0]; verb {
	case "validate":
		return a.cni.ValidateNetworkList(context.Background(), a.network)
	case "add":
		return a.add()
	case "check":
		return nil, a.check()
	case "del":
		return nil, a.del()
	case "cached":
		return a.cni.GetNetworkListCachedResult(a.network, a.runtime)
	case "storm":
		counts, err := integers(args[4:], 3)
		if err != nil {
			return nil, err
		}
		return a.storm(counts[0], counts[1], counts[2])
	default:
		return nil, fmt.Errorf("unknown verb %q", verb)
	}
}

func open(conflist, container, netns string) (*attachment, error) {
	network, err := libcni.ConfListFromFile(conflist)
	if err != nil {
		return nil, err
	}
	capabilities := map[string]interface{}{}
	if given := os.Getenv("CAP_ARGS"); given != "" {
		if err := json.Unmarshal([]byte(given), &capabilities); err != nil {
			return nil, fmt.Errorf("CAP_ARGS: %w", err)
		}
	}
	ifname := os.Getenv("CNI_IFNAME")
	if ifname == "" {
		ifname = "eth0"
	}
	return &attachment{
		cni:     libcni.NewCNIConfig(filepath.SplitList(os.Getenv("CNI_PATH")), nil),
		network: network,
		runtime: &libcni.RuntimeConf{
			ContainerID: container, NetNS: netns, IfName: ifname,
			Args: [][2]string{{"IgnoreUnknown", "1"}}, CapabilityArgs: capabilities,
		},
	}, nil
}

func (a *attachment) add() (types.Result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return a.cni.AddNetworkList(ctx, a.network, a.runtime)
}

func (a *attachment) check() error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return a.cni.CheckNetworkList(ctx, a.network, a.runtime)
}

func (a *attachment) del() error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return a.cni.DelNetworkList(ctx, a.network, a.runtime)
}

type stormReport struct {
	Adds   int      `json:"adds"`
	Dels   int      `json:"dels"`
	Errors []string `json:"errors"`
}

func (a *attachment) storm(rounds, dels, workers int) (*stormReport, error) {
	report := &stormReport{Errors: []string{}}
	for round := 1; round <= rounds; round++ {
		if _, err := a.add(); err != nil {
			return nil, fmt.Errorf("round %d: ADD: %w", round, err)
		}
		report.Adds++
		for _, err := range a.teardown(dels, workers) {
			text := strings.TrimSpace(err.Error())
			report.Errors = append(report.Errors, fmt.Sprintf("round %d: %s", round, text))
		}
		report.Dels += dels
	}
	return report, nil
}

// teardown runs the DELs with at most so many workers at a time and returns the errors.
func (a *attachment) teardown(dels, workers int) []error {
	turns := make(chan struct{}, dels)
	for i := 0; i < dels; i++ {
		turns <- struct{}{}
	}
	close(turns)

	var mutex sync.Mutex
	var failed []error
	var working sync.WaitGroup
	for i := 0; i < workers; i++ {
		working.Add(1)
		go func() {
			defer working.Done()
			for range turns {
				if err := a.del(); err != nil {
					mutex.Lock()
					failed = append(failed, err)
					mutex.Unlock()
				}
			}
		}()
	}
	working.Wait()
	return failed
}

func integers(args []string, wanted int) ([]int, error) {
	if len(args) != wanted {
		return nil, fmt.Errorf("storm needs %d numbers", wanted)
	}
	numbers := make([]int, wanted)
	for i, arg := range args {
		number, err := strconv.Atoi(arg)
		if err != nil || number < 1 {
			return nil, fmt.Errorf("%q is not a count", arg)
		}
		numbers[i] = number
	}
	return numbers, nil
}
