package coordinator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"

	"waypost/gossip/oneport"
	"waypost/systemd/daemon"
)

// Start runs the coordinator.
func (c *Coordinator) Start() error {
	if err := os.MkdirAll(c.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("coordinator: state directory: %w", err)
	}
	if c.journal != nil {
		// It writes until the last placement was answered.
		c.journalTask.Go(func() { c.journal.Run(c.journalDone) })
	}
	c.serve()
	if err := c.replica.Start(); err != nil {
		return errors.Join(fmt.Errorf("coordinator: raft: %w", err), c.Stop(context.Background()))
	}
	c.follow()
	if err := c.mesh.Start(); err != nil {
		return errors.Join(fmt.Errorf("coordinator: mesh: %w", err), c.Stop(context.Background()))
	}
	c.meshUp = true
	if err := c.startLocal(); err != nil {
		return errors.Join(err, c.Stop(context.Background()))
	}
	c.tasks.Go(c.tick)
	c.tasks.Go(c.judgeBoundaries)
	c.tasks.Go(c.recordWishes)
	c.tasks.Go(c.cases.run)
	c.tasks.Go(c.memos.ask.run)
	c.telling.Go(c.shipping)
	c.telling.Go(func() { c.lanes.outcomes.run(c.tellCtx, c.lanes.tellOutcomes) })
	c.tasks.Go(func() { c.views.Run(c.ctx) })
	c.tasks.Go(func() { c.join(c.ctx) })
	c.log.Info("coordinator started", "api", c.APIAddress(), "cluster", c.ClusterAddress(), "mesh", c.MeshAddress())
	return nil
}

// serve lets the ports take connections.
func (c *Coordinator) serve() {
	c.tasks.Go(func() {
		if err := c.clusterGRPC.Serve(c.clusterPort.Listener(oneport.GRPC)); err != nil && c.ctx.Err() == nil {
			c.log.Error("cluster port failed", "error", err)
		}
	})
	c.tasks.Go(func() {
		if err := c.api.Serve(c.apiPort.Listener(oneport.GRPC), c.apiPort.Listener(oneport.HTTP)); err != nil && c.ctx.Err() == nil {
			c.log.Error("api port failed", "error", err)
		}
	})
	c.clusterPort.Start()
	c.apiPort.Start()
}

// follow takes every state of the registry over, the present one at once.
func (c *Coordinator) follow() {
	changed, stop := c.replica.Subscribe()
	state := c.replica.State()
	c.takeNumber(state)
	c.applyState(state)
	c.exchange.Follow(state)
	c.tasks.Go(func() {
		defer stop()
		for {
			select {
			case <-c.ctx.Done():
				return
			case <-changed:
				state := c.replica.State()
				c.takeNumber(state)
				c.applyState(state)
				c.exchange.Follow(state)
			}
		}
	})
}

// startLocal opens the socket for people on this host.
func (c *Coordinator) startLocal() error {
	if c.cfg.RunDir == "" {
		return nil
	}
	l, err := daemon.ListenSocket(filepath.Join(c.cfg.RunDir, SocketName))
	if err != nil {
		return bad("run_dir", "%w", err)
	}
	c.tasks.Go(func() {
		if err := c.localGRPC.Serve(l); err != nil && c.ctx.Err() == nil {
			c.log.Error("local socket failed", "error", err)
		}
	})
	return nil
}

// lastWordsWithin bounds how long an end waits for lanes to take what the last
// calls left to be told: little, but an agent may read nothing any more.
const lastWordsWithin = time.Second

// Stop ends the coordinator: no new work, then lanes, Raft, mesh.
func (c *Coordinator) Stop(ctx context.Context) error {
	c.cancel()
	errs := []error{c.api.Stop(ctx)}
	c.localGRPC.Stop()
	c.endTell()
	c.telling.Wait()
	c.exchange.Stop()
	lastWords, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWordsWithin)
	defer cancel()
	c.laneServer.Finish(lastWords)
	errs = append(errs, c.replica.Stop(ctx))
	stopGracefully(lastWords, c.clusterGRPC)
	c.peers.close()
	if c.meshUp {
		if err := c.mesh.Leave(ctx); err != nil {
			c.log.Warn("not every member has heard the goodbye, the others take this coordinator for lost", "error", err)
		}
		errs = append(errs, c.mesh.Stop())
	}
	errs = append(errs, c.clusterPort.Close(), c.apiPort.Close())
	c.tasks.Wait()
	c.stopJournal.Do(func() { close(c.journalDone) })
	c.journalTask.Wait()
	return errors.Join(errs...)
}

// stopGracefully lets a server write what its calls have sent, until ctx ends.
func stopGracefully(ctx context.Context, s *grpc.Server) {
	stop := context.AfterFunc(ctx, s.Stop)
	defer stop()
	s.GracefulStop()
}
